"""Inputs for an existing .onnx file, drawn after what the graph does with them.

Token ids stay inside of the table that they index; what is called a mask, and other integers, are
zeros and ones with holes and padding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.padding import declared
from attn_export.attention.sizes import evaluate
from attn_export.parity.tolerance import Array
from attn_export.right_padded import mended


def is_drawn(value: ir.Value) -> bool:
    """Whether an input is of a kind that can be drawn: a tensor of a known rank and dtype."""
    tensor = isinstance(value.type, ir.TensorType) and value.shape is not None
    if not tensor or value.dtype is None:
        return False
    return value.dtype in _DRAWN


_DRAWN = {
    ir.DataType.BOOL, ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.FLOAT16,
    ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64,
    ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64,
}  # fmt: skip


def draw(model: ir.Model, sizes: Mapping[str, int], masked: bool, seed: int) -> dict[str, Array]:
    """Seeded inputs for a graph at these sizes."""
    rng = np.random.default_rng(seed)
    drawn = {str(value.name): _draw(value, sizes, masked, rng) for value in model.graph.inputs}
    for value in model.graph.inputs:
        keeps = declared(value)
        if keeps is not None:
            drawn[str(value.name)] = mended(drawn[str(value.name)], keeps)
    return drawn


def _draw(
    value: ir.Value, sizes: Mapping[str, int], masked: bool, rng: np.random.Generator
) -> Array:
    assert value.shape is not None
    assert value.dtype is not None
    shape = tuple(evaluate(size, sizes) for size in value.shape)
    dtype = value.dtype.numpy()
    if dtype.kind in "iu" and (rows := table_rows(value)):
        return rng.integers(0, rows, shape).astype(dtype)
    if value.dtype == ir.DataType.UINT8:
        return rng.integers(0, 256, shape).astype(dtype)
    if dtype.kind in "biu" or "mask" in str(value.name).lower():
        return _mask(shape, masked and len(shape) > 1, rng).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def _mask(shape: tuple[int, ...], masked: bool, rng: np.random.Generator) -> NDArray[np.bool_]:
    """True keeps: holes, every other row padded at its end, none blocked by chance."""
    kept = rng.random(shape) >= (0.3 if masked else 0.0)
    if masked and kept.size:
        kept.reshape(-1, shape[-1])[1::2] = np.arange(shape[-1]) < (shape[-1] + 1) // 2
        kept[..., :1] = True
    return kept


_KEEPS_NUMBERS = ("Cast", "Clip", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze",
                  "Unsqueeze")  # fmt: skip


def table_rows(value: ir.Value) -> int | None:
    """The size of the smallest constant table that an input's numbers index; None for no table."""
    found: list[int] = []
    todo, seen = [value], {id(value)}
    while todo:
        for node, position in todo.pop().uses():
            table = node.inputs[0]
            if node.op_type == "Gather" and position == 1 and table is not None:
                axis = node.attributes.get_int("axis", 0)
                size = table.shape[axis] if table.shape is not None else None
                if isinstance(size, int) and table.is_initializer():
                    found.append(size)
            elif node.op_type in _KEEPS_NUMBERS and position == 0:
                new = [out for out in node.outputs if id(out) not in seen]
                seen |= {id(out) for out in new}
                todo += new
    return min(found) if found else None
