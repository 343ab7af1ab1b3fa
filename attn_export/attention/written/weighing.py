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
    """

    product: ir.Node
    position: int
    moves: list[ir.Node] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    nan_to_zero: bool = False


def weighing(weights: ir.Value) -> Weighing:
    """Follow attention weights to their values.

    Raises:
        NotLowerable: they are used elsewhere, or go through something else.
    """
    moves: list[ir.Node] = []
    guards: list[Guard] = []
    nan_to_zero = False
    value = weights
    while True:
        guarded = _nan_guard(value)
        if guarded is not None:
            value, nan_to_zero = guarded, True
            continue
        if value.is_graph_output():
            raise NotLowerable(Reason.WEIGHTS_USED, "its weights are returned")
        uses = list(value.uses())
        if len(uses) != 1:
            readers = ", ".join(sorted({use.node.op_type for use in uses}))
            raise NotLowerable(Reason.WEIGHTS_USED, f"its weights are read by {readers}")
        ((node, position),) = uses
        if node.op_type == "MatMul":
            return Weighing(node, position, moves, guards, nan_to_zero)
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
