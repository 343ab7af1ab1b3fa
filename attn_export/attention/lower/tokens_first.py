"""Queries, keys and values as (B, tokens, heads * size), from the fewest nodes.

Exporters split heads with a row of layout nodes. The first of these that holds is taken:

1. the value that was split has that form itself;
2. it is a packed projection with constant weights, of which a product of its own takes the columns;
3. some of the layout nodes lead to it, as a Split of a packed projection does;
4. the tokens lie before the batch: one Transpose, on what it is projected from or on the value;
5. its columns are neighbours: one Slice;
6. the heads are apart but behind the tokens: one Reshape;
7. the heads lie before the tokens: one Transpose and one Reshape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.layout import arranged, existing, trace
from attn_export.attention.lower.operands import Operand, operand
from attn_export.attention.lower.rewrite import initializer
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.sizes import plain, sizes

BATCH_FIRST = {4: ((0,), (2,), (1, 3)), 3: ((0,), (1,), (2,))}
SEQUENCE_FIRST = {4: ((2,), (0,), (1, 3)), 3: ((1,), (0,), (2,))}
HEADS_APART = ((0,), (2,), (1,), (3,))


@dataclass(frozen=True)
class TokensFirst:
    """`value` (B, tokens, heads * size), computed from `source`, which the graph has.

    Attributes:
        heads_first: whether the heads lie before the tokens in the source, so that it is moved.
    """

    value: ir.Value
    source: ir.Value
    heads_first: bool = False


def tokens_first(b: Builder, value: ir.Value, role: str, heads: int) -> TokensFirst:
    """Bring a (B, heads, tokens, size) or (B, tokens, heads * size) value into the second form.

    Args:
        role: "query", "key" or "value".

    Raises:
        NotLowerable: its rank or the size of its heads is unknown.
    """
    rank = 0 if value.shape is None else len(value.shape)
    if rank not in BATCH_FIRST or not isinstance(sizes(value)[-1], int):
        raise NotLowerable(Reason.UNKNOWN_SHAPE, f"the rank or head size of its {role} is unknown")
    split = existing(value, BATCH_FIRST[rank])
    if split is not None and _is_all(split):
        return TokensFirst(split, split)
    linear = _linear(value, role, heads)
    if linear is not None and existing_batch_first(linear) is not None:
        return TokensFirst(_project(b, role, linear), beginning(linear))
    if split is not None:
        return TokensFirst(split, split)
    if linear is not None:
        return TokensFirst(_project(b, role, linear), beginning(linear))
    turned = existing(value, SEQUENCE_FIRST[rank])
    if turned is not None:
        return TokensFirst(b.transpose(turned, (1, 0, 2)), turned)
    sliced = _sliced(b, value)
    if sliced is not None:
        return sliced
    apart = existing(value, HEADS_APART) if rank == 4 else None
    source = value if apart is None else apart
    ordered = b.transpose(value, (0, 2, 1, 3)) if apart is None else apart
    return TokensFirst(flattened(b, ordered), source, apart is None)


def flattened(b: Builder, value: ir.Value) -> ir.Value:
    """(B, tokens, heads, size) as (B, tokens, heads * size)."""
    batch, tokens, heads, size = sizes(value)
    shape = b.constant(np.array([0, 0, heads * size], dtype=np.int64))  # 0 keeps a size
    return b.op("Reshape", [value, shape], (batch, tokens, heads * size))


def batch_first(b: Builder, part: Operand) -> ir.Value:
    """The source of a projection as (B, tokens, D_in); several projections share a Transpose."""
    found = existing_batch_first(part)
    if found is not None:
        return found
    for node in b.nodes:
        if node.op_type == "Transpose" and node.inputs[0] is part.source:
            return node.outputs[0]
    return b.transpose(part.source, (1, 0, 2))


def beginning(part: Operand) -> ir.Value:
    """The value of the graph that a projection which is computed anew reads."""
    return existing_batch_first(part) or part.source


def existing_batch_first(part: Operand) -> ir.Value | None:
    """The source of a projection as (B, tokens, D_in) where the graph has that."""
    if not part.sequence_first:
        return part.source
    return existing(part.source, ((1,), (0,), (2,)))


def _is_all(value: ir.Value) -> bool:
    """Whether a value holds its root's elements and not only a part of them."""
    root = trace(value).root
    return bool(plain(math.prod(sizes(value))) == plain(math.prod(sizes(root))))


def _linear(value: ir.Value, role: str, heads: int) -> Operand | None:
    try:
        return operand(value, role, heads)
    except NotLowerable:
        return None


def _project(b: Builder, role: str, part: Operand) -> ir.Value:
    source = batch_first(b, part)
    lead = sizes(source)[:-1]
    weight = initializer(f"{b.prefix}/{role}.weight", part.weight)
    b.weights.append(weight)
    result = b.op("MatMul", [source, weight], (*lead, part.weight.shape[1]))
    if part.bias.any():
        bias = initializer(f"{b.prefix}/{role}.bias", part.bias)
        b.weights.append(bias)
        result = b.op("Add", [result, bias], sizes(result))
    return result


def _sliced(b: Builder, value: ir.Value) -> TokensFirst | None:
    """Neighbouring columns of a (B, tokens, D) root."""
    view = trace(value)
    rank = len(view.axes)
    columns = view.indices((1, 3) if rank == 4 else (2,), 2) if len(view.offset) == 3 else None
    whole = arranged(view, BATCH_FIRST[rank])
    if columns is None or not whole.covers(0, 0) or not whole.covers(1, 1):
        return None
    flat = columns.reshape(-1)
    if not np.array_equal(flat, np.arange(flat[0], flat[0] + flat.size)):
        return None
    start, end, axis = (
        b.constant(np.array([i], dtype=np.int64)) for i in (flat[0], flat[-1] + 1, 2)
    )
    lead = sizes(view.root)[:2]
    cut = b.op("Slice", [view.root, start, end, axis], (*lead, flat.size))
    return TokensFirst(cut, view.root)
