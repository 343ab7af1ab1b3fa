"""Which rows of each value reach an output.

Backwards through the graph: a Gather or Slice of a few constant indices needs these rows of what
it reads, a node that computes each row by itself needs the rows of its operands that are needed of
its result, everything else needs all. What several nodes read is needed for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from attn_export.attention.data import subgraphs
from attn_export.attention.layout import constant
from attn_export.attention.lower.operands import Operand, operand
from attn_export.attention.reasons import NotLowerable
from attn_export.attention.sizes import sizes
from attn_export.attention.work.rows import Reads, Rows, reads

FEW = 8  # rows; a class token, a distillation token, a few registers
END = np.iinfo(np.int32).max  # exporters write the end of a Slice as this or more


@dataclass(frozen=True)
class Selection:
    """A node whose output is some rows of its first input.

    Attributes:
        drops: whether the axis is gone from the output, as with one index of rank 0.
    """

    node: ir.Node
    rows: Rows
    drops: bool = False


@dataclass(frozen=True)
class Query:
    """The queries of an attention that are projected from a (B, S, D) value with constant weights.

    Rows are then taken of what is projected, and projected anew: a packed projection of queries,
    keys and values is not needed for that.
    """

    part: Operand


@dataclass
class Demand:
    """What is needed of the values of a graph.

    Attributes:
        rows: by identity of the value; a value that is missing is needed whole, or not at all.
        steps: by identity of a node that may be computed for some rows alone, what it then reads.
        queries: by identity of such an Attention node, where its queries come from.
    """

    rows: dict[int, Rows]
    selections: list[Selection]
    steps: dict[int, Reads]
    queries: dict[int, Query]


def demand(graph: ir.Graph) -> Demand:
    """What is needed of each value of the main graph."""
    whole: set[int] = {id(value) for value in graph.outputs}
    for node in graph:
        for body in subgraphs(node):
            whole |= {id(v) for inner in body.all_nodes() for v in inner.inputs if v is not None}
    found = Demand({}, [], {}, {})

    def need(value: ir.Value | None, rows: Rows | None) -> None:
        if value is None or id(value) in whole:
            return
        known = found.rows.get(id(value))
        both = rows if known is None or rows is None else joined(known, rows)
        if both is None:
            found.rows.pop(id(value), None)
            whole.add(id(value))
        else:
            found.rows[id(value)] = both

    for node in reversed(graph):
        if not any(id(v) in whole or id(v) in found.rows for v in node.outputs):
            continue  # it is dead
        selection = selected(node)
        if selection is not None:
            found.selections.append(selection)
            need(node.inputs[0], selection.rows)
            continue
        steps = _steps(node, found.rows, whole)
        if steps is None:
            for value in node.inputs:
                need(value, None)
            continue
        found.steps[id(node)] = steps
        query = _query(node)
        if query is not None:
            found.queries[id(node)] = query
            rows = steps[0]
            assert rows is not None
            need(query.part.source, replace(rows, axis=1))
        for value, rows in list(zip(node.inputs, steps, strict=True))[query is not None :]:
            need(value, rows)
    found.selections.reverse()
    return found


def joined(one: Rows, other: Rows) -> Rows | None:
    """The rows of both; None where they lie along different axes."""
    if one.axis != other.axis:
        return None
    return Rows(one.axis, tuple(sorted({*one.indices, *other.indices})))


def selected(node: ir.Node) -> Selection | None:
    """A Gather or Slice of a few constant indices of an axis that has at least twice as many."""
    source = node.inputs[0] if node.inputs else None
    if node.domain not in ("", "ai.onnx") or source is None or source.shape is None:
        return None
    if source.is_initializer() or source.dtype not in _FLOATS:
        return None
    if node.op_type == "Gather":
        index = constant(node.inputs[1])
        axis = node.attributes.get_int("axis", 0) % len(source.shape)
        if index is None or index.ndim > 1:
            return None
        rows, drops = tuple(int(i) for i in index.reshape(-1)), index.ndim == 0
    elif node.op_type == "Slice":
        found = _sliced(node, len(source.shape))
        if found is None:
            return None
        axis, rows, drops = *found, False
    else:
        return None
    size = source.shape[axis]
    fits = not isinstance(size, int) or 2 * len(rows) <= size
    if not rows or len(rows) > FEW or len(set(rows)) < len(rows) or not fits:
        return None
    if isinstance(size, int):
        rows = tuple(row % size for row in rows)
    return Selection(node, Rows(axis, rows), drops)


_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def _sliced(node: ir.Node, rank: int) -> tuple[int, tuple[int, ...]] | None:
    """Axis and indices of a Slice along one axis, by steps of one."""
    given = [constant(value) for value in node.inputs[1:]]
    if any(row is None for row in given) or len(given) < 2:
        return None
    numbers = [[int(n) for n in row.reshape(-1)] for row in given if row is not None]
    starts, ends = numbers[:2]
    axes = numbers[2] if len(numbers) > 2 else list(range(len(starts)))
    steps = numbers[3] if len(numbers) > 3 else [1] * len(starts)
    cut = [
        (axis % rank, start, end)
        for axis, start, end in zip(axes, starts, ends, strict=True)
        if start != 0 or end < END
    ]
    if len(cut) != 1 or any(step != 1 for step in steps):
        return None
    axis, start, end = cut[0]
    last = 0 if start < 0 and end >= END else end
    if (start < 0) != (last < 0 or (last == 0 and start < 0)) or not 0 < last - start <= FEW:
        return None
    return axis, tuple(range(start, last))


def _steps(node: ir.Node, rows: Mapping[int, Rows], whole: set[int]) -> Reads | None:
    """What a node reads where only rows are needed of its one output."""
    used = [v for v in node.outputs if id(v) in rows or id(v) in whole]
    if len(used) != 1 or used[0] is not node.outputs[0] or id(used[0]) in whole:
        return None
    return reads(node, rows[id(used[0])])


def _query(node: ir.Node) -> Query | None:
    value = node.inputs[0] if node.op_type == "Attention" else None
    if value is None:
        return None
    heads = node.attributes.get_int("q_num_heads", 0)
    shape = sizes(value)
    if not heads:
        heads = shape[1] if len(shape) == 4 and isinstance(shape[1], int) else 0
    try:
        part = operand(value, "query", heads) if heads else None
    except NotLowerable:
        return None
    return None if part is None or part.sequence_first else Query(part)
