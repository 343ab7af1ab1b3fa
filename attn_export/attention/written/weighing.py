"""From the softmax to the product that weighs the values."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.written.steps import LAYOUT, PLAIN, filled, source, unexpressed


@dataclass(frozen=True)
class Guard:
    """Weights where `condition` is `keeps`, 0 elsewhere; or weights times `condition`.

    Attributes:
        moves: how many layout nodes of the way come before it.
        multiplies: whether it is a product.
    """

    condition: ir.Value
    keeps: bool
    moves: int
    multiplies: bool = False


@dataclass
class Weighing:
    """The MatMul of weights and values.

    Attributes:
        position: which of its inputs the weights are.
        moves: the layout nodes from the softmax to it.
        guards: what sets weights to 0 on the way.
        nan_to_zero: whether NaN, the softmax of a blocked row, becomes 0.
        read: values on the way that something else reads or that are returned, each with how many
            layout nodes come before it.
    """

    product: ir.Node
    position: int
    moves: list[ir.Node] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    nan_to_zero: bool = False
    read: list[tuple[ir.Value, int]] = field(default_factory=list)


def weighing(weights: ir.Value) -> Weighing:
    """Follow attention weights to their values.

    Raises:
        NotLowerable: they are used elsewhere once some were set to 0, or go through something else.
    """
    moves: list[ir.Node] = []
    read: list[tuple[ir.Value, int]] = []
    guards: list[Guard] = []
    nan_to_zero = False
    value = weights
    while True:
        guarded = _nan_guard(value)
        if guarded is not None:
            value, nan_to_zero = guarded, True
            continue
        use = _onward(value)
        if use is None or (guards and _is_read(value)):
            raise NotLowerable(Reason.WEIGHTS_USED, _told(value))
        if _is_read(value):
            read.append((value, len(moves)))
        node, position = use
        if node.op_type == "MatMul":
            return Weighing(node, position, moves, guards, nan_to_zero, read)
        if node.op_type in LAYOUT and position == 0:
            moves.append(node)
        elif node.op_type == "Where" and position in (1, 2):
            if filled(source(node, 3 - position)) != 0.0:
                raise NotLowerable(
                    Reason.NOT_EXPRESSIBLE, "its weights go through a Where that is no guard"
                )
            guards.append(Guard(source(node, 0), position == 1, len(moves)))
        elif node.op_type == "Mul":
            guards.append(Guard(source(node, 1 - position), True, len(moves), multiplies=True))
        elif not (node.op_type in PLAIN and position == 0 and _same_type(node)):
            raise unexpressed(node, "weights")
        value = node.outputs[0]


def _is_read(value: ir.Value) -> bool:
    """Whether weights are needed for more than to weigh values."""
    return value.is_graph_output() or len(value.uses()) > 1


def _told(value: ir.Value) -> str:
    if value.is_graph_output():
        return "its weights are returned"
    readers = ", ".join(sorted({use.node.op_type for use in value.uses()}))
    return f"its weights are read by {readers}"


def _onward(value: ir.Value) -> tuple[ir.Node, int] | None:
    """The use that leads to the product with values; of several, the nearest to it."""
    uses = [(use.node, use.idx) for use in value.uses()]
    if len(uses) == 1:
        return uses[0]
    for node, position in sorted(uses, key=lambda use: use[0].op_type != "MatMul"):
        through = node.op_type in LAYOUT | PLAIN and position == 0
        if node.op_type == "MatMul" or (through and _leads_to_product(node.outputs[0])):
            return node, position
    return None


def _leads_to_product(value: ir.Value) -> bool:
    return any(
        use.node.op_type == "MatMul"
        or (use.node.op_type in LAYOUT | PLAIN and _leads_to_product(use.node.outputs[0]))
        for use in value.uses()
    )


def _nan_guard(weights: ir.Value) -> ir.Value | None:
    """Where(IsNaN(weights), 0, weights): a query that may see no key gets 0, as from SDPA."""
    users = [use.node for use in weights.uses()]
    if len(users) != 2 or weights.is_graph_output():
        return None
    check, guard = sorted(users, key=lambda node: node.op_type != "IsNaN")
    if check.op_type != "IsNaN" or guard.op_type != "Where" or len(check.outputs[0].uses()) != 1:
        return None
    condition, replacement, kept = guard.inputs
    same = condition is check.outputs[0] and kept is weights
    return guard.outputs[0] if same and filled(replacement) == 0.0 else None


def _same_type(node: ir.Node) -> bool:
    before = node.inputs[0]
    return before is not None and before.dtype == node.outputs[0].dtype
