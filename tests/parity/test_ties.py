"""Positions and orders that rounding may decide, and those that it may not."""

from __future__ import annotations

import numpy as np
import pytest

from attn_export.parity.judge import judge
from attn_export.parity.rules import Rule
from attn_export.parity.ties import settle_index
from attn_export.reference import Case

LOGITS = np.array([[3.0, 1.0, 3.0 + 1e-6, 0.0], [0.0, 5.0, 2.0, 1.0]], np.float32)
TIE = 4e-6


def argmax_case(rule: Rule, choice: list[int]) -> list[bool]:
    """Whether `logits` and `label` pass, of a model whose label is the argmax of its logits."""
    reference = {"logits": LOGITS, "label": np.array([2, 1])}
    case = Case("c", "model", {}, reference, {}, {"logits": {"all": TIE / 2}, "label": {"all": 0}})
    results = judge({"logits": LOGITS, "label": np.array(choice)}, case, {"label": rule})
    return [result.passed for result in results]


def test_an_argmax_may_differ_among_candidates_that_tie() -> None:
    assert argmax_case(Rule("index", of="logits"), [0, 1]) == [True, True]


@pytest.mark.parametrize("choice", [[1, 1], [0, 2], [-2, 1], [4, 1]])
def test_an_argmax_of_another_candidate_fails(choice: list[int]) -> None:
    assert argmax_case(Rule("index", of="logits"), choice) == [True, False]


@pytest.mark.parametrize("rule", [Rule(), Rule("index")])
def test_integers_that_are_not_declared_must_be_equal_even_where_scores_tie(rule: Rule) -> None:
    assert argmax_case(rule, [0, 1]) == [True, False]
    assert argmax_case(rule, [2, 1]) == [True, True]


def test_whole_numbers_in_a_float_output_are_no_index() -> None:
    """Values 0, 1, 2 look like labels; they are compared as the numbers that they are."""
    case = Case("c", "model", {}, {"y": np.array([[2.0, 1.0]])}, {}, {"y": {"all": 1e-6}})
    (result,) = judge({"y": np.array([[1.0, 2.0]])}, case, {"y": Rule()})
    assert not result.passed


def test_top_k_may_swap_what_ties_and_may_not_name_one_candidate_twice() -> None:
    reference = np.array([[2, 0, 1], [1, 2, 3]])
    swapped, problem = settle_index(np.array([[0, 2, 1], [1, 2, 3]]), reference, LOGITS, -1, TIE)
    assert problem == ""
    np.testing.assert_array_equal(swapped, reference)
    twice = np.array([[2, 2, 1], [1, 2, 3]])
    np.testing.assert_array_equal(settle_index(twice, reference, LOGITS, -1, TIE)[0], twice)


def test_an_index_may_count_another_axis_than_the_last() -> None:
    """Classes of a segmentation (B, C, H, W) are counted on axis 1."""
    scores = np.zeros((1, 2, 1, 3), np.float32)
    scores[0, 1, 0] = [1.0, 1e-7, -1.0]
    settled, _ = settle_index(np.array([[[1, 0, 0]]]), np.array([[[1, 1, 0]]]), scores, 1, 1e-6)
    np.testing.assert_array_equal(settled, [[[1, 1, 0]]])


def test_positions_that_do_not_fit_their_scores_fail_in_words() -> None:
    case = Case("c", "model", {}, {"s": LOGITS, "i": np.array([1, 1, 1])}, {},
                {"s": {"all": 1.0}, "i": {"all": 0.0}})  # fmt: skip
    *_, result = judge(dict(case.outputs), case, {"i": Rule("index", of="s")})
    assert result.problem == "positions (3,) do not fit scores (2, 4)"


SORTED = {
    "scores": np.array([[0.9, 0.5, 0.5, 0.2, 0.2]], np.float32),
    "labels": np.array([[7, 3, 4, 5, 6]]),
    "boxes": np.arange(20, dtype=np.float32).reshape(1, 5, 4),
}
BY_SCORE = {"labels": Rule("index", sorted_by="scores"), "boxes": Rule(sorted_by="scores")}


def sorted_case(**changed: np.ndarray) -> dict[str, bool]:
    allowed = {"scores": {"all": 1e-6}, "labels": {"all": 0.0}, "boxes": {"all": 1e-3}}
    case = Case("c", "model", {}, SORTED, {}, allowed)
    found = judge({**SORTED, **changed}, case, BY_SCORE)
    return {result.output: result.passed for result in found}


def taken(order: list[int]) -> dict[str, np.ndarray]:
    return {name: array[:, order] for name, array in SORTED.items()}


def test_rows_of_equal_score_may_change_places_in_all_outputs_together() -> None:
    assert all(sorted_case(**taken([0, 2, 1, 4, 3])).values())


def test_rows_of_other_scores_may_not() -> None:
    assert not all(sorted_case(**taken([1, 0, 2, 3, 4])).values())
    rows = {name: SORTED[name][:, [1, 0, 2, 3, 4]] for name in ("labels", "boxes")}
    assert sorted_case(**rows) == {"scores": True, "labels": False, "boxes": False}


def test_labels_that_change_places_without_their_boxes_fail() -> None:
    assert not all(sorted_case(labels=SORTED["labels"][:, [0, 2, 1, 3, 4]]).values())


def test_the_last_of_those_that_tie_may_be_another_one() -> None:
    labels, boxes = SORTED["labels"].copy(), SORTED["boxes"].copy()
    labels[0, 4], boxes[0, 4] = 99, -1
    assert all(sorted_case(labels=labels, boxes=boxes).values())
    labels[0, 1] = 99
    assert not all(sorted_case(labels=labels, boxes=boxes).values())
