"""Where an op's output (B, S, N * Hv) goes: the farthest value that it can stand for.

Behind a site stand layout nodes, which merge the heads, and often a projection of each token. The
first of these that the graph has is replaced:

1. (B, S, N * Hv) itself;
2. what a projection makes of the tokens in another order, once they are in this order again;
3. (S, B, N * Hv), or tokens of all rows as one axis: a Transpose or a Reshape is left;
4. the site's own output (B, N, S, Hv): both are left.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.layout import Axis, View, atoms, identity, step, trace
from attn_export.attention.sizes import Size, sizes


def place(b: Builder, start: ir.Value, merged: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The value of the graph that is replaced, and what replaces it.

    Args:
        start: the site's output, (B, N, S, Hv) or (B, S, N * Hv).
        merged: (B, S, N * Hv).
    """
    if len(sizes(start)) == 3:
        return start, merged
    found = _forms(start)
    if "batch first" in found:
        return found["batch first"], merged
    for form in ("sequence first", "sequence rows"):
        if form in found:
            projected = _projected(b, found[form], start, merged)
            if projected is not None:
                return projected
    for form in ("sequence first", "sequence rows", "rows"):
        if form in found:
            value = merged if form == "rows" else b.transpose(merged, (1, 0, 2))
            return found[form], value if form == "sequence first" else _rows(b, value)
    heads, tokens, size = sizes(start)[1:]
    shape = b.constant(np.array([0, 0, heads, size], dtype=np.int64))
    apart = b.op("Reshape", [merged, shape], (sizes(start)[0], tokens, heads, size))
    return start, b.transpose(apart, (0, 2, 1, 3))


def _forms(start: ir.Value) -> dict[str, ir.Value]:
    """The farthest value of each form that layout nodes alone make of a site's output."""
    whole = identity(start)
    batch, heads, tokens, size = whole.axes
    forms: dict[str, tuple[Axis, ...]] = {
        "batch first": (batch, tokens, heads + size),
        "sequence first": (tokens, batch, heads + size),
        "rows": (batch + tokens, heads + size),
        "sequence rows": (tokens + batch, heads + size),
    }
    found: dict[str, ir.Value] = {}
    value = start
    while (node := _only_user(value)) is not None and len(node.outputs) == 1:
        value = node.outputs[0]
        view = trace(value, start)
        if view.root is not start:
            break
        for form, axes in forms.items():
            if view.same_as(View(start, axes, whole.offset)):
                found[form] = value
    return found


def _only_user(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _rows(b: Builder, value: ir.Value) -> ir.Value:
    first, second, width = sizes(value)
    shape = b.constant(np.array([-1, width], dtype=np.int64))
    return b.op("Reshape", [value, shape], (first * second, width))


def _projected(
    b: Builder, value: ir.Value, start: ir.Value, merged: ir.Value
) -> tuple[ir.Value, ir.Value] | None:
    """Project the tokens in the order of `merged`, where layout nodes restore that order behind."""
    row = _row_wise(value)
    if not row:
        return None
    batch, _, tokens, _ = sizes(start)
    width = sizes(row[-1].outputs[0])[-1]
    old = _restored(row[-1].outputs[0], batch, tokens, width)
    if old is None:
        return None
    flat = len(sizes(value)) == 2
    new = _rows(b, merged) if flat else merged
    before = value
    for node in row:
        new = _again(b, node, before, new)
        before = node.outputs[0]
    if flat:
        lead = b.op("Shape", [merged], [2], ir.DataType.INT64, start=0, end=2)
        last = b.constant(np.array([width], dtype=np.int64))
        shape = b.op("Concat", [lead, last], [3], ir.DataType.INT64, axis=0)
        new = b.op("Reshape", [new, shape], (batch, tokens, width))
    return old, new


def _row_wise(value: ir.Value) -> list[ir.Node]:
    """The projection of each token that follows: Gemm, or MatMul and Add."""
    node = _only_user(value)
    if node is None or node.inputs[0] is not value:
        return []
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if node.op_type == "Gemm":
        plain = node.attributes.get_int("transA", 0) == 0
        return [node] if plain and (bias is None or _same_for_all(bias)) else []
    second = node.inputs[1]
    if node.op_type != "MatMul" or second is None or len(sizes(second)) != 2:
        return []
    add = _only_user(node.outputs[0])
    if add is None or add.op_type != "Add":
        return [node]
    others = [v for v in add.inputs if v is not None and v is not node.outputs[0]]
    return [node, add] if len(others) == 1 and _same_for_all(others[0]) else [node]


def _same_for_all(bias: ir.Value) -> bool:
    return bias.shape is not None and all(size == 1 for size in list(bias.shape)[:-1])


def _restored(value: ir.Value, batch: Size, tokens: Size, width: Size) -> ir.Value | None:
    """The farthest (B, S, width) that layout nodes make of tokens that lie before the batch."""
    lead = (atoms(0, tokens), atoms(1, batch))
    axes = lead if len(sizes(value)) == 3 else (lead[0] + lead[1],)
    view: View | None = View(value, (*axes, atoms(2, width)), (0, 0, 0))
    found = None
    while (node := _only_user(value)) is not None and len(node.outputs) == 1:
        value = node.outputs[0]
        view = step(view, node) if view is not None and node.inputs[0] is not None else None
        if view is None:
            break
        if view.axes == (lead[1], lead[0], atoms(2, width)):
            found = value
    return found


def _again(b: Builder, node: ir.Node, before: ir.Value, new: ir.Value) -> ir.Value:
    """The same node on another value."""
    inputs = [new if value is before else value for value in node.inputs]
    attributes = {name: a.value for name, a in node.attributes.items() if not a.is_ref()}
    shape = (*sizes(new)[:-1], sizes(node.outputs[0])[-1])
    return b.op(node.op_type, inputs, shape, **attributes)
