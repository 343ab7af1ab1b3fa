"""--require and --excuse, on accounts as `inspect --json` prints them."""

from __future__ import annotations

from typing import Any

import pytest

from attn_export.attention.reasons import Reason
from attn_export.errors import UsageError
from attn_export.requirement import parse

LOWERED = {"name": "a", "status": "lowered", "reason": "", "code": None, "blocked_rows": "same"}
REFUSED = {"name": "b", "status": "refused", "reason": "mask: it is scaled", "code": Reason.MASK}
UNSEEN = {"name": "c", "status": "refused", "reason": "not taken", "code": Reason.NOT_RECOGNISED}


def account(*sites: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"sites": list(sites), "lowered": sum(s["status"] == "lowered" for s in sites)}]


@pytest.mark.parametrize(
    ("wanted", "excused", "sites", "good"),
    [
        (None, [], [REFUSED], True),
        ("all", [], [LOWERED], True),
        ("all", [], [LOWERED, REFUSED], False),
        ("all", ["b"], [LOWERED, REFUSED], True),
        ("all", ["mask"], [LOWERED, REFUSED], True),
        ("all", ["mask"], [REFUSED, UNSEEN], False),
        ("all", ["mask", "not-recognised"], [REFUSED, UNSEEN], True),
        ("all", ["window"], [REFUSED], False),
        ("all", [], [], True),
        ("1", [], [LOWERED, REFUSED], True),
        (2, [], [LOWERED, REFUSED], False),
        ("0", [], [REFUSED], True),
    ],
)
def test_what_is_required(
    wanted: str | int | None, excused: list[str], sites: list[dict[str, Any]], good: bool
) -> None:
    assert (parse(wanted, excused).failure(account(*sites)) is None) == good


def test_the_sentence_names_the_site_the_reason_and_the_way_out() -> None:
    failure = parse("all").failure(account(REFUSED, UNSEEN))
    assert str(failure) == (
        "b and 1 more was refused (mask: it is scaled);"
        " mend it, or excuse it with --excuse b or --excuse mask."
    )


def test_a_decomposition_by_choice_is_not_refused() -> None:
    site = {**LOWERED, "status": "decomposed-by-choice"}
    assert parse("all").failure(account(site)) is None


def test_blocked_rows_that_change_need_to_be_allowed() -> None:
    site = {**LOWERED, "blocked_rows": "mean"}
    failure = parse(None).failure(account(site))
    assert str(failure).startswith("a gives blocked rows 'mean'; add --allow-blocked-rows")
    assert parse(None, (), True).failure(account(site)) is None


def test_an_excuse_that_nothing_needed_is_told() -> None:
    rule = parse("all", ["b", "window", "d"])
    assert rule.unused(account(REFUSED)) == [
        "--excuse window excused nothing", "--excuse d excused nothing",
    ]  # fmt: skip


@pytest.mark.parametrize("wanted", ["some", "-1", "1.5", ""])
def test_neither_all_nor_a_number_is_usage(wanted: str) -> None:
    with pytest.raises(UsageError, match=r"--require .*does not parse; use all, or a number"):
        parse(wanted)
