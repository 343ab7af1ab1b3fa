"""What a bundle stores of the values inside of a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_export.errors import FileError
from attn_export.parity.deviation import allowed, deviation
from attn_export.parity.flow import Place
from attn_export.parity.trace import Expected, expect, places, read_trace, write_trace

HERE = Place("node", "Add")


def test_all_of_a_small_value_is_kept_and_of_a_large_one_places_in_every_column() -> None:
    assert places(5, 32).tolist() == [0, 1, 2, 3, 4]
    spread = places(100 * 64, 256)
    assert len(spread) == 256
    assert spread.max() < 6400
    assert len(set(spread % 64)) == 64  # rows of 64, as the heads of a model
    assert len(set(spread // 64)) == 100


def test_a_value_is_described_by_its_truth_and_by_the_error_of_float32() -> None:
    found = expect(np.array([[3.0, -4.0], [0.0, np.inf]]), np.array([[3.0, -4.5], [0.0, np.inf]]))
    assert found.shape == (2, 2)
    assert found.samples.tolist() == [3.0, -4.0, 0.0, np.inf]
    assert (found.error, found.largest) == (0.5, 4.0)
    assert found.rms == pytest.approx(np.sqrt(25 / 3))
    assert not found.exact
    assert expect(np.array([True, False])).exact


def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    values = {"a": expect(np.arange(6.0).reshape(2, 3)), "b": expect(np.ones(4096), count=7)}
    write_trace(tmp_path / "t", {"batch=1": values, "batch=3": {}})
    found = read_trace(tmp_path / "t")
    assert found.keys() == {"batch=1", "batch=3"}
    assert found["batch=1"]["a"].samples.tolist() == [0, 1, 2, 3, 4, 5]
    assert found["batch=1"]["b"].places.tolist() == places(4096, 7).tolist()
    assert found["batch=1"]["b"].rms == 1.0


def test_no_trace_is_empty_and_a_broken_one_is_a_bad_file(tmp_path: Path) -> None:
    assert read_trace(tmp_path / "none") == {}
    (tmp_path / "t").write_bytes(b"no safetensors")
    with pytest.raises(FileError, match="is not a readable trace"):
        read_trace(tmp_path / "t")


def test_a_value_may_be_off_by_eight_times_the_error_of_float32_or_by_the_floor() -> None:
    exact = expect(np.full(4, 2.0))
    eps = float(np.finfo(np.float32).eps)
    assert allowed(exact, np.dtype(np.float32)) == 64 * eps * 2.0
    assert allowed(expect(np.zeros(2), np.full(2, 0.5)), np.dtype(np.float32)) == 4.0
    half = np.dtype(np.float16)  # its eps is 2**13 times as large
    assert allowed(expect(np.zeros(2), np.full(2, 2.0**-20)), half) == 8 * 2.0**-7
    assert allowed(expect(np.arange(3)), np.dtype(np.int64)) == 0.0


def test_the_worst_element_of_a_value_is_told_with_its_index() -> None:
    truth = np.zeros((2, 3))
    truth[1, 2] = 7.0
    actual = truth.astype(np.float32)
    right = deviation("v", HERE, actual, expect(truth))
    assert right is not None
    assert not right.drifts
    actual[1, 2] = 6.0
    found = deviation("v", HERE, actual, expect(truth))
    assert found is not None
    assert (found.drifts, found.where, found.got, found.expected) == (True, (1, 2), 6.0, 7.0)
    assert str(found).startswith("'v' is off by 1 at [1, 2], ")


def test_an_overflow_is_told_with_the_magnitude_and_the_end_of_the_dtype() -> None:
    actual = np.array([1.0, np.inf], np.float16)
    found = deviation("p", HERE, actual, expect(np.array([1.0, 9e4])))
    assert found is not None
    assert found.drifts
    assert found.overflows
    assert str(found) == (
        "'p' is inf at [1], where 9e+04 is right; it reaches 9e+04 and float16 ends at 65504"
    )


@pytest.mark.parametrize(
    "actual", [np.zeros(3, np.float32), np.zeros(2, np.int64), np.zeros(0, np.float32)]
)
def test_what_has_another_shape_or_kind_is_not_compared(actual: np.ndarray) -> None:
    assert deviation("v", HERE, actual, Expected((2,), np.ones(2))) is None
