"""Scores beside the errors: built in, and a user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_export.errors import UsageError
from attn_export.parity.hooks import Seen, resolve
from attn_export.reference import Case

LOGITS = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])


def score(name: str, found: np.ndarray, reference: np.ndarray) -> float:
    return float(resolve(name).function({"y": found}, {"y": reference}))


def test_top1_is_the_share_of_rows_whose_largest_entry_agrees() -> None:
    assert score("top1", LOGITS, LOGITS * 0.5) == 1.0
    assert score("top1:y", LOGITS[:, ::-1], LOGITS) == 0.0
    assert score("top1", LOGITS, LOGITS[[0, 0, 2, 3]]) == 0.75


def test_exact_is_the_share_of_samples_without_any_difference() -> None:
    tokens = np.array([[5, 6, 2], [5, 7, 2], [5, 6, 7], [1, 1, 1]])
    other = tokens.copy()
    other[1, 2] = 9
    assert score("exact", other, tokens) == 0.75
    assert score("exact", tokens[:, :2], tokens) == 0.0


BOXES = np.array([[[0, 0, 10, 10, 0.9, 1], [20, 20, 30, 30, 0.8, 2]]], np.float32)


def test_boxes_is_the_share_of_detections_with_a_partner() -> None:
    moved, relabelled = BOXES.copy(), BOXES.copy()
    moved[0, 0, :4] += 5
    relabelled[0, 1, 5] = 3
    assert score("boxes", BOXES[:, ::-1], BOXES) == 1.0
    assert score("boxes", moved, BOXES) == score("boxes", relabelled, BOXES) == 0.5


def test_map50_takes_the_references_confident_detections_for_the_truth() -> None:
    shifted = BOXES.copy()
    shifted[0, 0, :4] += 1  # overlap 81 of 119
    assert score("map50", shifted, BOXES) == pytest.approx(1.0)
    assert score("map50", BOXES[:, ::-1] + [100, 100, 100, 100, 0, 0], BOXES) == 0.0
    assert np.isnan(score("map50", BOXES, BOXES * [1, 1, 1, 1, 0.1, 1]))


def test_cases_count_by_their_samples_and_those_without_a_score_do_not() -> None:
    seen = Seen(resolve("top1"))
    for rows, found in ((1, LOGITS[:1, ::-1]), (3, LOGITS[:3])):
        seen.add({"y": found}, Case("c", "model", {}, {"y": LOGITS[:rows]}))
    seen.add({}, Case("c", "model", {}, {"y": LOGITS}))
    assert seen.mean() == 0.75


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    path.write_text(
        "def worst(found, reference):\n    return abs(found['y'] - reference['y']).max()"
    )
    assert score(f"{path}:worst", LOGITS + 0.5, LOGITS) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("top2", "there is no metric 'top2'"),
        ("nowhere:f", "importing nowhere raised ModuleNotFoundError"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("math:pie", "math has no function 'pie'"),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_what_is_no_metric_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        resolve(text)


def test_a_metric_that_fails_is_told_with_the_case() -> None:
    with pytest.raises(UsageError, match="the metric operator:truediv failed on c"):
        Seen(resolve("operator:truediv")).add({}, Case("c", "model", {}, {}))


def test_one_of_several_outputs_must_be_named() -> None:
    two = {"y": LOGITS, "z": LOGITS}
    with pytest.raises(UsageError, match="write top1:OUTPUT"):
        resolve("top1").function(two, two)
    assert resolve("top1:z").function(two, two) == 1.0
