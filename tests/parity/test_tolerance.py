"""How much error is allowed: worked-out values, and what must hold for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attn_export.parity.tolerance import Group, allowed_error, max_abs, rms, rounded, split

EPS = 2.0**-23  # of float32
VALUES = arrays(np.float32, (4,), elements=st.floats(-8, 8, width=32, allow_subnormal=False))


def test_eight_times_pytorchs_own_error_is_allowed() -> None:
    truth = np.array([1.0, -1.0, 1.0, -1.0])
    reference = np.array([1.0, -1.0, 1.0, -1.0 + 2**-10], np.float32)
    assert allowed_error(reference, truth) == 8 * 2**-10


def test_an_exact_reference_still_allows_64_roundings_of_the_rms() -> None:
    truth = np.array([3.0, -3.0])
    assert allowed_error(truth.astype(np.float32), truth) == 64 * EPS * 3.0


def test_the_floor_is_rms_and_not_the_largest_value() -> None:
    truth = np.array([8.0, 0.0, 0.0, 0.0])  # rms 4
    assert allowed_error(truth.astype(np.float32), truth) == 64 * EPS * 4.0


def test_float16_has_the_roundings_of_float16() -> None:
    truth = np.array([2.0, 2.0])
    assert allowed_error(truth.astype(np.float16), truth) == 64 * 2**-10 * 2.0


def test_without_a_truth_the_reference_gives_the_scale() -> None:
    assert allowed_error(np.array([2.0, -2.0], np.float32), None) == 64 * EPS * 2.0


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
def test_integers_and_booleans_must_be_equal(dtype: type) -> None:
    assert allowed_error(np.ones(3, dtype), np.zeros(3)) == 0.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_widen_nothing(value: float) -> None:
    truth = np.array([2.0, 2.0, value])
    assert allowed_error(truth.astype(np.float32), truth) == 64 * EPS * 2.0


def test_nothing_finite_allows_nothing() -> None:
    assert allowed_error(np.full(2, np.nan, np.float32), np.full(2, np.nan)) == 0.0


def test_values_whose_square_overflows_do_not_allow_everything() -> None:
    assert np.isfinite(allowed_error(np.array([1e200]), np.array([1e200])))


@given(reference=VALUES, noise=VALUES, power=st.integers(-60, 60))
def test_scaling_by_a_power_of_two_scales_the_allowance_equally(
    reference: np.ndarray, noise: np.ndarray, power: int
) -> None:
    truth = reference.astype(np.float64) + noise.astype(np.float64) * 1e-6
    scale = 2.0**power
    scaled = allowed_error(reference * np.float32(scale), truth * scale)
    assert scaled == allowed_error(reference, truth) * scale


@given(reference=VALUES, noise=VALUES)
def test_the_reference_always_passes_its_own_allowance(
    reference: np.ndarray, noise: np.ndarray
) -> None:
    truth = reference.astype(np.float64) + noise.astype(np.float64) * 1e-6
    assert max_abs(reference.astype(np.float64), truth) <= allowed_error(reference, truth)


def test_an_output_without_groups_is_one_group() -> None:
    array = np.arange(4.0)
    assert split(array, ())["all"] is array


def test_groups_are_slices_of_one_axis() -> None:
    rows = np.arange(12.0).reshape(2, 6)
    parts = split(rows, [Group("boxes", -1, 0, 4), Group("scores", -1, 4, 6)])
    np.testing.assert_array_equal(parts["boxes"], [[0, 1, 2, 3], [6, 7, 8, 9]])
    np.testing.assert_array_equal(parts["scores"], [[4, 5], [10, 11]])


@pytest.mark.parametrize("group", [Group("a", 2, 0, 1), Group("a", 1, 0, 7), Group("a", -3, 0, 1)])
def test_a_group_outside_of_the_array_is_refused(group: Group) -> None:
    with pytest.raises(ValueError, match="group a lies outside of shape"):
        split(np.zeros((2, 6)), [group])


@pytest.mark.parametrize(
    "groups",
    [
        [Group("boxes", 1, 0, 4)],
        [Group("boxes", 1, 0, 4), Group("scores", 1, 5, 6)],
        [Group("boxes", 1, 0, 4), Group("scores", 1, 3, 5)],
        [Group("boxes", 1, 0, 4), Group("scores", 0, 0, 1)],
    ],
)
def test_groups_that_leave_elements_out_are_refused(groups: list[Group]) -> None:
    with pytest.raises(ValueError, match="do not cover"):
        split(np.zeros((2, 6)), groups)


def test_rms_and_max_abs_of_nothing_are_zero() -> None:
    empty = np.zeros(0)
    assert rms(empty) == max_abs(empty, empty) == 0.0


def test_each_number_moves_by_one_rounding_up_or_down() -> None:
    threes = np.full(1000, 3.0, np.float32)
    moved = rounded(threes, np.float32, seed=0) / 3.0 - 1.0
    assert sorted({float(step) for step in moved.round(12)}) == pytest.approx([-EPS, EPS], rel=1e-4)
    other = rounded(threes, np.float32, seed=1) / 3.0 - 1.0
    assert (other != moved).any()


def test_integers_are_not_moved() -> None:
    np.testing.assert_array_equal(rounded(np.arange(3), np.float32, seed=0), np.arange(3))
