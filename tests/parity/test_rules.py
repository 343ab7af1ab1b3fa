"""Rules as they are written, stored and refused."""

from __future__ import annotations

import pytest

from attn_export.errors import UsageError
from attn_export.parity.rules import Rule, check_rules, from_manifest, parse_pairs, parse_rule
from attn_export.parity.tolerance import Group


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("elementwise", Rule()),
        ("index", Rule("index")),
        ("index:logits", Rule("index", of="logits")),
        ("index:logits:1", Rule("index", of="logits", axis=1)),
        ("sorted:scores", Rule(sorted_by="scores")),
        ("detections", Rule("detections")),
    ],
)
def test_a_rule_is_read_and_survives_the_manifest(text: str, rule: Rule) -> None:
    assert parse_rule(text) == parse_rule(rule.word) == rule
    assert from_manifest({"name": "y", **rule.to_manifest()}) == rule


def test_groups_and_masks_survive_the_manifest() -> None:
    rule = Rule(mask="not:padding", groups=(Group("box", 2, 0, 4), Group("score", 2, 4, 5)))
    assert from_manifest(rule.to_manifest()) == rule
    assert rule.mask_input == "padding"


@pytest.mark.parametrize("text", ["", "equal", "index:", "index:a:b", "sorted", "sorted:", "a:b:c"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"no way '.*' to compare an output"):
        parse_rule(text)


def test_pairs() -> None:
    assert parse_pairs("--metric", ["a=b=c", "d=e"], "X") == {"a": "b=c", "d": "e"}
    for bad in (["a"], ["=b"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(UsageError, match="--metric"):
            parse_pairs("--metric", bad, "NAME=VALUE")


@pytest.mark.parametrize(
    ("name", "rule", "sentence"),
    [
        ("z", Rule(), "there is no output 'z'"),
        ("y", Rule("index", of="w"), "compared by 'w', which is no other output"),
        ("y", Rule("index", of="y"), "compared by 'y', which is no other output"),
        ("y", Rule(mask="w"), "masked by 'w', which is not an input"),
        ("y", Rule(mask="x"), r"a mask .B, S. says which positions"),
        ("y", Rule(mask="mask", groups=(Group("a", 1, 0, 1),)), "groups on axis 1"),
    ],
)
def test_rules_name_what_there_is(name: str, rule: Rule, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check_rules({name: rule}, {"y": 3, "s": 2}, {"x": 3, "mask": 2})
