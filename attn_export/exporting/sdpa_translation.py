"""F.scaled_dot_product_attention -> standard Attention, whatever its number of axes.

PyTorch takes any number of leading axes and broadcasts them; its ONNX exporter translates queries,
keys and values (B, N, S, H) of equal batch and heads, and refuses all else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import opset23

op: Any = opset23
Operands = tuple[Any, Any, Any]


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """aten::scaled_dot_product_attention as one standard Attention node, without dropout.

    1. Leading axes that differ are expanded to each other. One key head, or several that are
       grouped, serve all query heads as they are: so does the standard op.
    2. Three axes (B, S, H) get a head axis of size 1.
    3. More than four have those before the heads merged into one.
    4. A mask with one number for all keys has it for each: ONNX pads such a mask, and hides the
       other keys.
    """
    attn_mask = _for_each_key(attn_mask, key)
    rank = max(_rank(x) for x in (query, key, value))
    inner = 3 if enable_gqa or _one_head(query, key, value) else 2
    operands = query, key, value = _broadcast((query, key, value), inner)
    if rank == 3:
        operands = _each(lambda x: op.Unsqueeze(x, [1]), operands)
        attn_mask = op.Unsqueeze(attn_mask, [-3]) if _rank(attn_mask) == 3 else attn_mask
    elif rank > 4:
        if _rank(attn_mask) > 3:
            leading = op.Concat(op.Shape(query, end=-3), op.Constant(value_ints=[1, 1, 1]), axis=0)
            wide = op.Expand(attn_mask, leading)
            sizes = [*query.shape[:-3], *attn_mask.shape[-3:]]
            attn_mask = _merged(_sized(wide, attn_mask, sizes))
        operands = _each(_merged, operands)
    output, _, _, _ = op.Attention(*operands, attn_mask, scale=scale, is_causal=int(is_causal))
    if rank == 3:
        return op.Squeeze(output, [1])
    if rank > 4:
        shape = op.Concat(op.Shape(query, end=-1), op.Shape(value, start=-1), axis=0)
        return op.Reshape(output, shape)
    return output


def _rank(value: Any) -> int:
    return 0 if value is None else len(value.shape)


def _for_each_key(mask: Any, key: Any) -> Any:
    """A mask (..., S, 1) as (..., S, T)."""
    if mask is None or mask.shape[-1] != 1 or key.shape[-2] == 1:
        return mask
    ones = op.Constant(value_ints=[1] * (_rank(mask) - 1))
    wide = op.Expand(mask, op.Concat(ones, op.Shape(key, start=-2, end=-1), axis=0))
    return _sized(wide, mask, [*mask.shape[:-1], key.shape[-2]])


def _one_head(query: Any, key: Any, value: Any) -> bool:
    if min(_rank(x) for x in (query, key, value)) < 4:
        return False
    return bool(key.shape[-3] == 1 and value.shape[-3] == 1)


def _broadcast(operands: Operands, inner: int) -> Operands:
    """All axes but the `inner` last ones at the sizes that they broadcast to."""
    leading = [list(x.shape)[:-inner] for x in operands]
    if all(sizes == leading[0] for sizes in leading):
        return operands
    rank = max(map(len, leading))
    padded = [[1] * (rank - len(sizes)) + sizes for sizes in leading]
    common = [next((s for s in axis if s != 1), 1) for axis in zip(*padded, strict=True)]
    ones = op.Constant(value_ints=[1] * inner)
    shapes = [op.Concat(op.Shape(x, end=-inner), ones, axis=0) for x in operands]

    def expanded(value: Any) -> Any:
        result = value
        for shape in shapes:  # Expand broadcasts both ways
            result = op.Expand(result, shape)
        return _sized(result, value, [*common, *value.shape[-inner:]])

    return _each(expanded, operands)


def _each(function: Callable[[Any], Any], operands: Operands) -> Operands:
    query, key, value = operands
    return function(query), function(key), function(value)


def _merged(value: Any) -> Any:
    """(..., N, S, H) as (B, N, S, H)."""
    shape = op.Concat(op.Constant(value_ints=[-1]), op.Shape(value, start=-3), axis=0)
    sizes = [math.prod(value.shape[:-3]), *value.shape[-3:]]
    return _sized(op.Reshape(value, shape), value, sizes)


def _sized(result: Any, like: Any, sizes: Sequence[int | ir.SymbolicDim]) -> Any:
    """The result with its sizes, which shape inference loses where a product is symbolic."""
    result.type, result.shape = like.type, ir.Shape(sizes)
    return result
