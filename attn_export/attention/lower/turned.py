"""Queries and keys that GroupQueryAttention turns itself, in place of two RotaryEmbeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.data import inputs_behind, unique
from attn_export.attention.layout import constant
from attn_export.attention.lower.cache import Cache
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.sizes import plain, sizes


@dataclass(frozen=True)
class Turned:
    """What RotaryEmbedding gets of queries and keys.

    Attributes:
        query, key: (B, S, N * H) and (B, S, K * H), not yet turned.
        cos, sin: (P + S, H / 2), for the positions of the past as well.
        sources: the inputs that both tables are made from.
    """

    query: ir.Value
    key: ir.Value
    cos: ir.Value
    sin: ir.Value
    interleaved: int
    sources: list[ir.Value]


def turned(
    b: Builder, query: ir.Value, key: ir.Value, head_size: int, cache: Cache | None
) -> Turned:
    """Queries and keys in front of their RotaryEmbeddings.

    The op reads its tables from the number of past tokens on, so that rows of zeros stand for
    those. The tables are the query's; that the key's are equal, the proof shows.

    Raises:
        NotLowerable: they are not both turned as GroupQueryAttention does it.
    """
    first, second = _rotary(query), _rotary(key)
    ways = {node.attributes.get_int("interleaved", 0) for node in (first, second)}
    x, _, cos, sin = first.inputs
    y = second.inputs[0]
    if x is None or y is None or cos is None or sin is None or len(ways) > 1:
        raise NotLowerable(Reason.LAYOUT, "its queries and keys are turned in different ways")
    if head_size % 16 or sizes(cos)[-1] != head_size // 2:
        raise NotLowerable(
            Reason.HEADS, "GroupQueryAttention turns whole heads of a multiple of 16"
        )
    tables = [v for node in (first, second) for v in node.inputs[2:] if v is not None]
    sources = unique(source for table in tables for source in inputs_behind(table))
    past = None if cache is None else cache.past_key
    cos, sin = (_behind_past(b, table, past) for table in (cos, sin))
    return Turned(x, y, cos, sin, ways.pop(), sources)


def _rotary(value: ir.Value) -> ir.Node:
    """The com.microsoft RotaryEmbedding of a (B, S, D) value, its one table read from row 0 on."""
    node = value.producer()
    if node is None or node.op_type != "RotaryEmbedding" or node.domain != "com.microsoft":
        raise NotLowerable(Reason.LAYOUT, "its queries and keys do not both come from a rotation")
    start = constant(node.inputs[1])
    if start is None or start.tolist() != [0] or len(sizes(value)) != 3:
        raise NotLowerable(Reason.LAYOUT, "each row of its rotation has positions of its own")
    return node


def _behind_past(b: Builder, table: ir.Value, past: ir.Value | None) -> ir.Value:
    if past is None:
        return table
    tokens, half = sizes(table)
    before = sizes(past)[2]
    int64 = ir.DataType.INT64
    count = b.op("Shape", [past], [1], int64, start=2, end=3)
    width = b.constant(np.array([half], np.int64))
    shape = b.op("Concat", [count, width], [2], int64, axis=0)
    zeros = b.op("Expand", [b.number(0.0, table), shape], (before, half))
    return b.op("Concat", [zeros, table], (plain(before + tokens), half), axis=0)
