"""What counts as the same answer, and above all what does not."""

from __future__ import annotations

import numpy as np
import pytest

from attn_export.parity.compare import Comparison, compare, compare_outputs, cosine, sqnr
from attn_export.parity.tolerance import Group, allowed_error

ONES = np.ones((2, 3), np.float32)


def one(actual: np.ndarray, reference: np.ndarray, allowed: float = 0.5) -> Comparison:
    (result,) = compare("y", actual, reference, {"all": allowed})
    return result


def changed(value: float) -> np.ndarray:
    array = ONES.copy()
    array[1, 2] = value
    return array


def test_figures_of_a_difference() -> None:
    result = one(changed(3.0), ONES)
    assert (result.max_abs, result.max_rel, result.mean_abs) == (2.0, 2.0, 2 / 6)
    assert (result.mismatched, result.elements, result.where) == (1, 6, (1, 2))
    assert result.problem == "1 of 6 elements differ by more than 0.5, worst 2 at [1, 2]"


def test_exactly_the_allowed_error_passes_and_the_next_number_fails() -> None:
    assert one(changed(1.5), ONES).passed
    assert not one(changed(np.nextafter(np.float32(1.5), np.float32(2))), ONES).passed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_fails_against_a_number_whatever_is_allowed(
    value: float,
) -> None:
    for allowed in (1.0, 1e300, float("inf"), float("nan")):
        assert not one(changed(value), ONES, allowed).passed
        assert not one(ONES, changed(value), allowed).passed


def test_infinities_of_opposite_sign_fail() -> None:
    assert not one(changed(np.inf), changed(-np.inf), float("inf")).passed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_same_value_that_is_not_finite_passes(value: float) -> None:
    assert one(changed(value), changed(value), 0.0).passed


def test_an_allowance_of_nan_allows_nothing() -> None:
    assert not one(changed(1.1), ONES, float("nan")).passed


def test_integers_beyond_two_to_the_53_are_told_apart() -> None:
    actual, reference = np.array([2**53 + 1]), np.array([2**53])
    assert float(actual[0]) == float(reference[0])  # which is what makes this hard
    assert one(actual, reference, 0.0).mismatched == 1


def test_booleans_are_compared_by_value() -> None:
    result = one(np.array([True, False]), np.array([True, True]), 0.0)
    assert (result.mismatched, result.max_abs, result.passed) == (1, 1.0, False)


@pytest.mark.parametrize(
    ("actual", "problem"),
    [
        (np.ones((3, 2), np.float32), "its shape is (3, 2), the reference's is (2, 3)"),
        (np.ones((1, 3), np.float32), "its shape is (1, 3), the reference's is (2, 3)"),
        (np.ones((2, 3), np.float64), "its dtype is float64, the reference's is float32"),
    ],
)
def test_another_shape_or_dtype_fails_even_where_it_would_broadcast(
    actual: np.ndarray, problem: str
) -> None:
    assert one(actual, ONES).problem == problem


def test_an_empty_output_compares_nothing_and_fails() -> None:
    empty = np.zeros((0, 3), np.float32)
    assert one(empty, empty).problem == "it is empty, so nothing was compared"


@pytest.mark.parametrize(
    ("names", "problems"),
    [
        (["y"], {"z": "the runtime did not return it"}),
        (["y", "z", "w"], {"w": "the reference has no such output"}),
        (
            ["y", "zz"],
            {"zz": "the reference has no such output", "z": "the runtime did not return it"},
        ),
        ([], {"y": "the runtime did not return it", "z": "the runtime did not return it"}),
    ],
)
def test_a_missing_extra_or_misnamed_output_fails(
    names: list[str], problems: dict[str, str]
) -> None:
    allowed = {name: {"all": 1.0} for name in ("y", "z")}
    reference = {"y": ONES, "z": ONES}
    results = compare_outputs(dict.fromkeys(names, ONES), reference, allowed, {}, {})
    assert {r.output: r.problem for r in results if not r.passed} == problems


def test_outputs_that_are_swapped_fail() -> None:
    allowed = {name: {"all": 1e-6} for name in ("y", "z")}
    results = compare_outputs(
        {"y": 2 * ONES, "z": ONES}, {"y": ONES, "z": 2 * ONES}, allowed, {}, {}
    )
    assert [r.passed for r in results] == [False, False]


BOXES = [Group("boxes", 1, 0, 4), Group("scores", 1, 4, 6)]


def detections(score_error: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """actual, reference and truth: boxes in pixels beside scores in 0..1."""
    truth = np.array([[600.0, 400.0, 50.0, 80.0, 0.75, 0.25]])
    reference = truth.astype(np.float32)
    actual = reference.copy()
    actual[0, 5] += score_error
    return actual, reference, truth


def test_boxes_in_pixels_do_not_hide_an_error_in_scores() -> None:
    actual, reference, truth = detections(1e-3)
    whole = allowed_error(reference, truth)
    assert compare("y", actual, reference, {"all": whole}, truth)[0].passed  # without groups it hid
    allowed = {
        "boxes": allowed_error(reference[:, :4], truth[:, :4]),
        "scores": allowed_error(reference[:, 4:], truth[:, 4:]),
    }
    boxes, scores = compare("y", actual, reference, allowed, truth, BOXES)
    assert (boxes.group, boxes.passed, scores.group, scores.passed) == (
        "boxes", True, "scores", False,
    )  # fmt: skip
    assert scores.where == (0, 1)


def test_errors_against_the_truth_are_told_for_both() -> None:
    truth = np.array([[1.0, 2.0]])
    (result,) = compare(
        "y",
        np.array([[1.25, 2.0]], np.float32),
        np.array([[1.0, 2.125]], np.float32),
        {"all": 1.0},
        truth,
    )
    assert (result.error_vs_truth, result.torch_error_vs_truth) == (0.25, 0.125)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1, 0], [0, 1], 0.0), ([1, 1], [2, 2], 1.0), ([1, 0], [-3, 0], -1.0), ([0], [0], 1.0),
     ([0], [1], 0.0), ([np.inf], [1], np.nan)],
)  # fmt: skip
def test_cosine(a: list[float], b: list[float], expected: float) -> None:
    found = cosine(np.array(a, np.float64), np.array(b, np.float64))
    assert found == pytest.approx(expected, nan_ok=True)


def test_a_reference_without_a_finite_number_proves_nothing() -> None:
    nothing = np.full((2, 3), np.nan, np.float32)
    (result,) = compare("y", nothing, nothing, {"all": 1.0})
    assert not result.passed
    assert "no finite number" in result.problem


@pytest.mark.parametrize(
    ("actual", "expected"),
    [([1.0, 1.0], np.inf), ([1.1, 0.9], 20.0), ([2.0, 2.0], 0.0), ([np.nan, 1.0], np.nan)],
)
def test_sqnr_in_decibels(actual: list[float], expected: float) -> None:
    """An error of a tenth of the signal is 20 dB."""
    assert sqnr(np.array(actual), np.ones(2)) == pytest.approx(expected, nan_ok=True)


def test_sqnr_of_a_reference_of_zeros() -> None:
    assert sqnr(np.ones(2), np.zeros(2)) == -np.inf
    assert sqnr(np.zeros(2), np.zeros(2)) == np.inf


def test_the_smallest_tolerance_is_one_that_passes_and_the_next_smaller_one_fails() -> None:
    reference = np.full((2, 3), 4.0, np.float32)
    result = one(changed(3.0) + 3, reference)  # the worst differs by 2, of an rms of 4
    assert (result.smallest_atol, result.smallest_rtol) == (2.0, 0.5)
    assert one(changed(3.0) + 3, reference, 2.0).passed
    assert not one(changed(3.0) + 3, reference, 1.999).passed


def test_no_tolerance_passes_a_nan() -> None:
    result = one(changed(np.nan), ONES)
    assert (result.smallest_atol, result.smallest_rtol) == (np.inf, np.inf)


KEEP = np.array([[True, True, False], [True, False, False]])


def masked(actual: np.ndarray, keep: np.ndarray = KEEP) -> Comparison:
    (result,) = compare("y", actual, np.ones((2, 3, 4), np.float32), {"all": 0.5}, keep=keep)
    return result


@pytest.mark.parametrize("value", [9.0, np.nan, np.inf])
def test_masked_positions_are_not_looked_at(value: float) -> None:
    actual = np.ones((2, 3, 4), np.float32)
    actual[0, 2], actual[1, 1:] = value, value
    result = masked(actual)
    assert (result.passed, result.excluded, result.elements) == (True, 12, 12)


def test_the_place_of_a_difference_counts_masked_positions_too() -> None:
    actual = np.ones((2, 3, 4), np.float32)
    actual[1, 0, 3] = 9.0
    assert masked(actual).where == (1, 0, 3)


def test_a_mask_that_keeps_nothing_or_does_not_fit_fails() -> None:
    ones = np.ones((2, 3, 4), np.float32)
    assert masked(ones, np.zeros((2, 3), bool)).problem == (
        "every position is masked, so nothing was compared"
    )
    assert "a mask (3, 2) does not fit" in masked(ones, KEEP.T).problem
