"""Detections matched to the reference's order."""

from __future__ import annotations

import numpy as np
import pytest

from attn_export.parity.detections import align, map50

REFERENCE = np.array(
    [[[0, 0, 10, 10, 0.9, 1], [20, 20, 30, 30, 0.5, 2], [40, 40, 50, 50, 0.5, 2]]], np.float32
)


def test_rows_of_equal_score_may_change_places() -> None:
    swapped = REFERENCE[:, [0, 2, 1]]
    np.testing.assert_array_equal(align(swapped, REFERENCE, edge=0.0), REFERENCE)


def test_one_box_with_two_classes_is_matched_by_class() -> None:
    two = np.array([[[0, 0, 9, 9, 0.5, 1], [0, 0, 9, 9, 0.5, 2]]], np.float32)
    np.testing.assert_array_equal(align(two[:, ::-1], two, edge=-1.0), two)


def test_a_moved_box_stays_moved() -> None:
    moved = REFERENCE.copy()
    moved[0, 0, :4] += 0.25
    np.testing.assert_array_equal(align(moved, REFERENCE, edge=0.0), moved)


@pytest.mark.parametrize(("column", "value"), [(5, 3), (4, 0.1), (0, -30)])
def test_a_wrong_class_score_or_box_is_not_explained_away(column: int, value: float) -> None:
    wrong = REFERENCE.copy()
    wrong[0, 0, column] = value
    assert np.abs(align(wrong, REFERENCE, edge=1e-6) - REFERENCE).max() > 0.05


def test_a_detection_pushed_off_the_end_of_the_list_is_no_error() -> None:
    other = REFERENCE.copy()
    other[0, 2] = [70, 70, 90, 90, 0.5, 7]
    np.testing.assert_array_equal(align(other, REFERENCE, edge=1e-6), REFERENCE)


def test_a_doubled_box_does_not_stand_for_two() -> None:
    doubled = REFERENCE[:, [0, 1, 1]]
    assert np.abs(align(doubled, REFERENCE, edge=-1.0) - REFERENCE).max() == 20


def test_map_of_one_right_and_one_missed_object_of_a_class_is_a_half() -> None:
    """Precision is 1 up to recall 0.5 and 0 beyond: 51 of COCO's 101 recall points."""
    target = np.array([[[0, 0, 10, 10, 1], [20, 20, 30, 30, 1], [0, 0, 0, 0, -1]]], np.float32)
    found = np.array([[[0, 0, 10, 10, 0.9, 1], [60, 60, 70, 70, 0.1, 1]]], np.float32)
    assert map50(found, target) == pytest.approx(51 / 101)
    assert map50(found[:, :, :], target[:, :1]) == pytest.approx(1.0)
