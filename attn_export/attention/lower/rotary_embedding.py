"""com.microsoft RotaryEmbedding and ai.onnx RotaryEmbedding (opset 23), one kernel for a rotation.

Both take (B, N, S, H), or (B, S, N * H) with `num_heads`, and turn the first `rotary_embedding_dim`
elements of a head. They differ in their tables:

1. com.microsoft takes (input, position_ids, cos, sin) with tables (positions, R/2). One table for
   all rows is read from position 0 on; a table for each row is laid out as B * S positions.
2. ai.onnx takes (X, cos, sin) with tables (B, S, R/2) that ONNX Runtime does not broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.data import unique
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.metadata import origin_of
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.rotary import Rotation, Table
from attn_export.attention.sizes import Size, sizes

CONTRIB = "com.microsoft.RotaryEmbedding"
STANDARD = "ai.onnx.RotaryEmbedding"


@dataclass(frozen=True)
class _Frame:
    """Where batch, tokens and heads lie in x.

    Attributes:
        rows: 1 where all rows of the batch share the tables' positions, else the batch size.
        heads_first: (B, N, S, H) and not (B, S, N, H).
    """

    batch: Size
    heads: int
    tokens: Size
    head_size: int
    rows: Size
    heads_first: bool

    @property
    def split(self) -> tuple[Size, ...]:
        return self.batch, self.tokens, self.heads, self.head_size

    @property
    def merged(self) -> tuple[Size, ...]:
        return self.batch, self.tokens, self.heads * self.head_size


def build(rotation: Rotation, op: str) -> Rewrite:
    """One node, with the tables in the form that it takes.

    Args:
        op: CONTRIB or STANDARD.

    Raises:
        NotLowerable: the tables differ by head, or have other positions than x has tokens.
    """
    frame = _frame(rotation)
    anchors = [rotation.x, rotation.cos.value, rotation.sin.value]
    origin = origin_of(rotation.output.producer())
    b = Builder(f"{rotation.output.name}/rotary", origin, anchors)
    cos, sin = (_columns(b, table) for table in (rotation.cos, rotation.sin))
    source, layout = _source(b, rotation, frame)
    if op == CONTRIB:
        positions = _positions(b, frame)
        size = frame.tokens if frame.rows == 1 else frame.batch * frame.tokens
        tables = [b.reshape(table, (size, rotation.size // 2)) for table in (cos, sin)]
        inputs = [layout, positions, *tables]
    else:
        rows = (frame.rows, frame.tokens, rotation.size // 2)
        whole = (frame.batch, *rows[1:])
        inputs = [layout, *(b.expand(b.reshape(table, rows), whole) for table in (cos, sin))]
    attributes = {"interleaved": int(rotation.interleaved)}
    if len(sizes(layout)) == 3 or rotation.size < frame.head_size:
        attributes["num_heads"] = frame.heads
    if rotation.size < frame.head_size:
        attributes["rotary_embedding_dim"] = rotation.size
    turned = b.op("RotaryEmbedding", inputs, sizes(layout), None, **attributes)
    if op == CONTRIB:
        b.nodes[-1].domain = "com.microsoft"
    new = _unfold(b, turned, rotation, frame)
    new.shape, new.type = rotation.output.shape, rotation.output.type
    bounds = unique([source, *rotation.sources])
    return Rewrite(op, bounds, rotation.output, new, b.nodes, b.weights)


def shares_rows(rotation: Rotation) -> bool:
    """Whether all rows of the batch have the positions of one table."""
    return _lead(rotation.cos, len(sizes(rotation.output)) - 1)[0] == 1


def _frame(rotation: Rotation) -> _Frame:
    *lead, head_size = sizes(rotation.output)
    positions = [_lead(table, len(lead)) for table in (rotation.cos, rotation.sin)]
    if positions[0] != positions[1] or len(lead) not in (2, 3):
        raise NotLowerable(Reason.LAYOUT, "its tables do not lie along batch and tokens")
    own = positions[0]
    if len(lead) == 2:
        (batch, tokens), (rows, places), heads, heads_first = lead, own, 1, False
    elif own[1] == 1:
        (batch, heads, tokens), (rows, _, places), heads_first = lead, own, True
    else:
        (batch, tokens, heads), (rows, places, shared), heads_first = lead, own, False
        if shared != 1:
            raise NotLowerable(Reason.LAYOUT, "its tables differ by head")
    if places != tokens or rows not in (1, batch) or not isinstance(heads, int):
        raise NotLowerable(Reason.LAYOUT, "its tables have other positions than it has tokens")
    return _Frame(batch, heads, tokens, int(head_size), rows, heads_first)


def _lead(table: Table, axes: int) -> tuple[Size, ...]:
    own = sizes(table.value)
    own = own[: len(own) - table.axes]
    return (*(1 for _ in range(axes - len(own))), *own)


def _columns(b: Builder, table: Table) -> ir.Value:
    """The table's own elements, one for each pair, along the last axis."""
    shape = sizes(table.value)
    lead, width = shape[: len(shape) - table.axes], int(np.prod(shape[len(shape) - table.axes :]))
    flat = b.reshape(table.value, (*lead, width))
    indices = np.array(table.indices)
    if np.array_equal(indices, np.arange(width)):
        return flat
    steps = np.unique(np.diff(indices))
    if steps.size == 1 and steps[0] > 0:
        numbers = (indices[0], indices[-1] + 1, -1, steps[0])
        cuts = [b.constant(np.array([number], dtype=np.int64)) for number in numbers]
        return b.op("Slice", [flat, *cuts], (*lead, indices.size))
    picked = b.constant(indices.astype(np.int64))
    return b.op("Gather", [flat, picked], (*lead, indices.size), axis=-1)


def _source(b: Builder, rotation: Rotation, frame: _Frame) -> tuple[ir.Value, ir.Value]:
    """Where the rewrite begins, and that value as (B, S, N * H) or (B, N, S, H).

    A Transpose in front of x is put behind the rotation, where attention can take it along.
    """
    x, node = rotation.x, rotation.x.producer()
    if not frame.heads_first:
        return x, b.reshape(x, frame.merged)
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        before = node.inputs[0]
        if list(node.attributes.get_ints("perm", [])) == [0, 2, 1, 3]:
            return before, b.reshape(before, frame.merged)
    return x, b.reshape(x, (frame.batch, frame.heads, frame.tokens, frame.head_size))


def _unfold(b: Builder, turned: ir.Value, rotation: Rotation, frame: _Frame) -> ir.Value:
    if len(sizes(turned)) == 4:
        return turned
    if len(sizes(rotation.output)) == 3:
        return b.reshape(turned, sizes(rotation.output))
    split = b.reshape(turned, frame.split)
    return b.transpose(split, [0, 2, 1, 3]) if frame.heads_first else split


def _positions(b: Builder, frame: _Frame) -> ir.Value:
    """From 0 on where one table serves all rows; else each row reads its own part of the table."""
    zero = b.constant(np.array([0], dtype=np.int64))
    if frame.rows == 1:
        return zero
    shape = b.shape((frame.batch, frame.tokens))
    count = b.op("ReduceProd", [shape], (), ir.DataType.INT64, keepdims=0)
    bounds = [b.constant(np.array(i, dtype=np.int64)) for i in (0, 1)]
    steps = b.op("Range", [bounds[0], count, bounds[1]], [frame.batch * frame.tokens])
    return b.op("Reshape", [steps, shape], (frame.batch, frame.tokens))
