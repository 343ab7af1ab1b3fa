"""Tensors of the protocol as numpy arrays, or one sentence.

Source: Open Inference Protocol v2, "Tensor Data" and "Tensor Data Types", and its binary data
extension: row-major, little endian, one byte for a BOOL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import UsageError
from attn_export.serve.refusals import BadRequest

Array = NDArray[np.generic]

DATATYPES = {
    "bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64",
    "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
}  # fmt: skip
DTYPES = {datatype: np.dtype(name) for name, datatype in DATATYPES.items()}
MOST_AXES = 32


def datatype(name: str, dtype: str) -> str:
    """The protocol's word for a numpy dtype.

    Raises:
        UsageError: it has none.
    """
    if dtype not in DATATYPES:
        raise UsageError(
            f"'{name}' is {dtype}, which the Open Inference Protocol does not have",
            "export the model with another dtype",
        )
    return DATATYPES[dtype]


def declared(name: str, kind: Any, shape: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and shape that a request declares for an input.

    Raises:
        BadRequest: there are no such.
    """
    if not isinstance(kind, str) or kind not in DTYPES:
        raise BadRequest(
            f"the datatype of input '{name}' is {_shown(kind)}", f"name one of {', '.join(DTYPES)}"
        )
    sound = isinstance(shape, Sequence) and not isinstance(shape, str) and len(shape) <= MOST_AXES
    if not sound or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise BadRequest(
            f"the shape of input '{name}' is {_shown(shape)}", "give a list of sizes from 0 on"
        )
    return DTYPES[kind], tuple(shape)


def from_numbers(
    name: str, dtype: np.dtype[Any], shape: tuple[int, ...], data: Any, *, finite: bool = True
) -> Array:
    """An input from a list of numbers, flat in row-major order or nested.

    Args:
        finite: the list itself cannot hold infinities, so that one comes from a number too large.

    Raises:
        BadRequest: these are no such numbers, they do not fit the dtype, or not the shape.
    """
    if not isinstance(data, list):
        raise BadRequest(f"the data of input '{name}' is {_shown(data)}", "give a list of numbers")
    try:
        found = np.array(data)
    except ValueError:
        found = np.array(["ragged"])
    whole = "iu"
    if dtype == np.uint64 and found.dtype.kind in "fO":  # from 2**63 on, next to small ones
        found = np.array(data, object)
        whole = "O" if all(type(number) is int for number in found.flat) else whole
    allowed = {"b": "b", "f": "iuf"}.get(dtype.kind, whole)
    if found.size and found.dtype.kind not in allowed:
        raise BadRequest(
            f"the data of input '{name}' is not all {DATATYPES[dtype.name]}",
            "give numbers of that datatype, nested as the shape is or not at all",
        )
    if found.shape not in (shape, (math.prod(shape),)):
        raise BadRequest(
            f"input '{name}' has {found.size} numbers in {found.shape}, its shape is {shape}",
            "give as many as the shape takes, nested as it is or not at all",
        )
    try:
        with np.errstate(over="ignore"):
            array = np.array(data, dtype).reshape(shape)
    except OverflowError:
        array = None
    if array is None or (finite and dtype.kind == "f" and not np.isfinite(array).all()):
        raise BadRequest(
            f"a number of input '{name}' does not fit {DATATYPES[dtype.name]}",
            "send it in range, or in binary where it is meant to be infinite",
        )
    return array


def from_bytes(
    name: str, dtype: np.dtype[Any], shape: tuple[int, ...], data: bytes | memoryview
) -> Array:
    """An input from its bytes, copied, since what numpy reads in place may not be aligned.

    Raises:
        BadRequest: there are more or fewer than the shape takes, or a BOOL is neither 0 nor 1.
    """
    size = math.prod(shape) * dtype.itemsize
    if len(data) != size:
        raise BadRequest(
            f"input '{name}' has {len(data)} bytes, {DATATYPES[dtype.name]} {shape} takes {size}",
            "send the whole tensor",
        )
    if dtype.kind == "b" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise BadRequest(f"a byte of input '{name}' is neither 0 nor 1", "send BOOL as 0 and 1")
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(shape)


def to_bytes(array: Array) -> bytes:
    """Row-major, little endian."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
