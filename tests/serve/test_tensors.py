"""Tensors of each datatype, from values worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attn_export.serve.refusals import BadRequest
from attn_export.serve.tensors import DTYPES, from_bytes, from_numbers, to_bytes

BYTES = [
    ("BOOL", b"\0\1", [False, True]),
    ("INT8", b"\1\xff", [1, -1]),
    ("UINT8", b"\1\xff", [1, 255]),
    ("INT16", b"\1\0\xff\xff", [1, -1]),
    ("UINT16", b"\1\0\xff\xff", [1, 65535]),
    ("INT32", b"\1\0\0\0\xfe\xff\xff\xff", [1, -2]),
    ("UINT32", b"\1\0\0\0\xff\xff\xff\xff", [1, 2**32 - 1]),
    ("INT64", b"\1" + b"\0" * 7 + b"\xff" * 8, [1, -1]),
    ("UINT64", b"\1" + b"\0" * 7 + b"\xff" * 8, [1, 2**64 - 1]),
    ("FP16", b"\x00\x3c\x00\xc0", [1.0, -2.0]),
    ("FP32", b"\x00\x00\x80\x3f\x00\x00\x00\xc0", [1.0, -2.0]),
    ("FP64", b"\x00" * 6 + b"\xf0\x3f" + b"\x00" * 7 + b"\xc0", [1.0, -2.0]),
]


def test_every_datatype_is_here() -> None:
    assert {kind for kind, _, _ in BYTES} == DTYPES.keys()


@pytest.mark.parametrize(("kind", "raw", "numbers"), BYTES)
def test_bytes_and_numbers_are_the_same_tensor(kind: str, raw: bytes, numbers: list[Any]) -> None:
    for array in (
        from_bytes("x", DTYPES[kind], (2, 1), memoryview(b"?" + raw)[1:]),  # not aligned
        from_numbers("x", DTYPES[kind], (2, 1), numbers),
        from_numbers("x", DTYPES[kind], (2, 1), [[number] for number in numbers]),
    ):
        assert (array.dtype, array.shape) == (DTYPES[kind], (2, 1))
        assert array.ravel().tolist() == numbers
        assert array.flags.aligned
        assert array.flags.c_contiguous
        assert to_bytes(array) == raw


def test_bytes_are_row_major_whatever_the_memory_is() -> None:
    assert to_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3).T) == b"\0\3\1\4\2\5"


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [("UINT64", [1, 2**64]), ("UINT64", [1, -1]), ("UINT64", [1.5, 2**63]), ("INT8", [1, 128]),
     ("FP16", [1.0, 70000.0]), ("INT64", [1, 2.0]), ("BOOL", [0, 1]), ("FP32", ["1", "2"]),
     ("FP32", [[1.0, 2.0], [3.0]]), ("FP32", [{}, {}])],
)  # fmt: skip
def test_numbers_that_are_none_of_the_datatype(kind: str, numbers: list[Any]) -> None:
    with pytest.raises(BadRequest, match="input 'x'"):
        from_numbers("x", DTYPES[kind], (2,), numbers)


def test_an_empty_tensor() -> None:
    assert from_numbers("x", DTYPES["FP32"], (0, 3), []).shape == (0, 3)
    assert from_bytes("x", DTYPES["FP32"], (0, 3), b"").shape == (0, 3)
