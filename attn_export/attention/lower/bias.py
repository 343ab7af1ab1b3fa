"""A mask as the bias on scores that the com.microsoft ops take, with PyTorch's answers.

1. They take (1 or B, 1 or N, S, T) and broadcast S and T no further.
2. A row of -inf gives NaN there. The bias is finite instead: half the most negative number, which
   blocks next to any other score and leaves room to add one.
3. A query that may see no key would then get the mean of the values. PyTorch gives 0 where the mask
   is bool or -inf, and that mean where it is the most negative number; so rows of the first kind
   are set to 0 behind the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.layout import constant
from attn_export.attention.lower.mask import as_given
from attn_export.attention.lower.site_inputs import mask_of
from attn_export.attention.masks import lowest, may_block
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site
from attn_export.attention.sizes import Size, plain, sizes


@dataclass(frozen=True)
class ScoreBias:
    """What is added to the scores.

    Attributes:
        value: (1 or B, 1 or N, S, T).
        given: the mask as the model has it.
        allowed: bool, broadcasts against (B, N, S, 1): whether a query sees any key. None where
            each does, or where the bias itself gives the right answer.
    """

    value: ir.Value
    given: ir.Value
    allowed: ir.Value | None


def score_bias(
    b: Builder, site: Site, query: ir.Value, keys: Sequence[tuple[ir.Value, int]]
) -> ScoreBias | None:
    """The bias of a site; None where it has no mask.

    Args:
        query: (B, S, ...).
        keys: values and axes whose sizes add up to T.

    Raises:
        NotLowerable: the rank or dtype of the mask is unknown.
    """
    mask = mask_of(site)
    if mask is None:
        return None
    given = as_given(mask)
    if given.shape is None or len(given.shape) > 4 or given.dtype is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "the rank or dtype of its mask is unknown")
    bias, allowed = _boolean(b, given, query) if site.mask == "bool" else _additive(b, given)
    tokens = sizes(query)[1], plain(sum(sizes(value)[axis] for value, axis in keys))
    if len(sizes(bias)) < 4 or sizes(bias)[2:] != tokens:
        lead = (1,) * (4 - len(sizes(bias))) + sizes(bias)[:-2]
        ones = b.constant(np.ones(2, dtype=np.int64))
        parts = [_size(b, query, 1), total(b, keys)]
        shape = b.op("Concat", [ones, *parts], [4], ir.DataType.INT64, axis=0)
        # Expand broadcasts both ways, so the batch and head axes keep their sizes.
        bias = b.op("Expand", [bias, shape], (*lead[:2], *tokens))
    return ScoreBias(bias, given, allowed)


def repaired(b: Builder, merged: ir.Value, heads: int, allowed: ir.Value | None) -> ir.Value:
    """(B, S, N * Hv) with 0 for each query that sees no key."""
    if allowed is None:
        return merged
    batch, tokens, width = sizes(merged)
    own = (1,) * (4 - len(sizes(allowed))) + sizes(allowed)
    zero = b.number(0.0, merged)
    if own[1] == 1:  # the same for all heads
        if len(sizes(allowed)) == 4:
            axes = b.constant(np.array([1], dtype=np.int64))
            allowed = b.op("Squeeze", [allowed, axes], (own[0], *own[2:]))
        return b.op("Where", [allowed, merged, zero], sizes(merged), merged.dtype)
    if len(sizes(allowed)) == 3:
        axes = b.constant(np.array([0], dtype=np.int64))
        allowed = b.op("Unsqueeze", [allowed, axes], own)
    allowed = b.transpose(allowed, (0, 2, 1, 3))
    apart = _reshape(b, merged, (batch, tokens, heads, width // heads))
    kept = b.op("Where", [allowed, apart, zero], sizes(apart), merged.dtype)
    return _reshape(b, kept, (batch, tokens, width))


def _boolean(b: Builder, mask: ir.Value, like: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    blocks = _half_of_lowest(b, like)
    bias = b.op("Where", [mask, b.number(0.0, like), blocks], sizes(mask), like.dtype)
    array = constant(mask)
    if array is not None and array.any(axis=-1).all():
        return bias, None
    return bias, b.op("Greater", [_best(b, bias), blocks], _rows(mask), ir.DataType.BOOL)


def _additive(b: Builder, mask: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    if not may_block(mask):
        return mask, None
    bias = b.op("Max", [mask, _half_of_lowest(b, mask)], sizes(mask))
    array = constant(mask)
    if array is not None and not np.isneginf(np.asarray(array, np.float64)).all(axis=-1).any():
        return bias, None
    lost = b.op("IsInf", [_best(b, mask)], _rows(mask), ir.DataType.BOOL, detect_positive=0)
    return bias, b.op("Not", [lost], _rows(mask), ir.DataType.BOOL)


def _rows(mask: ir.Value) -> tuple[Size, ...]:
    return (*sizes(mask)[:-1], 1)


def _best(b: Builder, mask: ir.Value) -> ir.Value:
    axes = b.constant(np.array([-1], dtype=np.int64))
    return b.op("ReduceMax", [mask, axes], _rows(mask), keepdims=1)


def _half_of_lowest(b: Builder, like: ir.Value) -> ir.Value:
    return b.number(lowest(like) / 2, like)


def _size(b: Builder, value: ir.Value, axis: int) -> ir.Value:
    return b.op("Shape", [value], [1], ir.DataType.INT64, start=axis, end=axis + 1)


def total(b: Builder, keys: Sequence[tuple[ir.Value, int]]) -> ir.Value:
    """The sum of some sizes at run time, int64 (1,)."""
    found = [_size(b, value, axis) for value, axis in keys]
    result = found[0]
    for size in found[1:]:
        result = b.op("Add", [result, size], [1], ir.DataType.INT64)
    return result


def _reshape(b: Builder, value: ir.Value, wanted: tuple[Size, ...]) -> ir.Value:
    shape = b.constant(np.array([0, 0, *wanted[2:]], dtype=np.int64))  # 0 keeps a size
    return b.op("Reshape", [value, shape], wanted)
