"""Softmax, as one node or as exp(x) / sum(exp(x))."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from attn_export.attention.layout import constant

GUARDS = ("Add", "Max", "Clip", "Cast", "Identity", "Expand")
"""What may stand between a sum and the division by it: a guard against a sum of zero."""


@dataclass(frozen=True)
class Softmax:
    """A softmax over `axis`, counted from 0, that ends in `node`.

    Attributes:
        widened: whether it is computed in more bits than its scores and weights have.
    """

    node: ir.Node
    scores: ir.Value
    weights: ir.Value
    axis: int
    widened: bool = False


def softmax(node: ir.Node) -> Softmax | None:
    """The softmax that ends in a node, None if none does."""
    if node.domain not in ("", "ai.onnx") or not node.outputs:
        return None
    weights = node.outputs[0]
    if weights.shape is None:
        return None
    rank = len(weights.shape)
    if node.op_type == "Softmax" and node.inputs[0] is not None:
        along = node.attributes.get_int("axis", -1) % rank
        return _without_casts(Softmax(node, node.inputs[0], weights, along))
    if node.op_type != "Div" or len(node.inputs) != 2:
        return None
    top, total = node.inputs
    powers = top.producer() if top is not None else None
    axis = _sum_of(total, top, rank)
    if powers is None or powers.op_type != "Exp" or powers.inputs[0] is None or axis is None:
        return None
    return Softmax(node, _unshifted(powers.inputs[0], axis), weights, axis)


def _without_casts(found: Softmax) -> Softmax:
    """Half precision is often cast to float32 for the softmax alone, and back behind it."""
    widen, uses = found.scores.producer(), list(found.weights.uses())
    if widen is None or widen.op_type != "Cast" or len(uses) != 1:
        return found
    scores, narrow = widen.inputs[0], uses[0].node
    if scores is None or narrow.op_type != "Cast" or found.weights.is_graph_output():
        return found
    own, wide = scores.dtype, found.scores.dtype
    if own is None or wide is None or not (own.is_floating_point() and wide.is_floating_point()):
        return found
    if own.bitwidth >= wide.bitwidth or narrow.outputs[0].dtype != own:
        return found
    return Softmax(found.node, scores, narrow.outputs[0], found.axis, widened=True)


def _sum_of(total: ir.Value | None, powers: ir.Value | None, rank: int) -> int | None:
    """The axis along which `total` is the sum of `powers`."""
    node = total.producer() if total is not None else None
    while node is not None and node.op_type in GUARDS and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "ReduceSum" or node.inputs[0] is not powers:
        return None
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or axes.size != 1 or not node.attributes.get_int("keepdims", 1):
        return None
    return int(axes.reshape(-1)[0]) % rank


def _unshifted(scores: ir.Value, axis: int) -> ir.Value:
    """x of x - max(x): what is the same for every key changes no weight."""
    node = scores.producer()
    if node is None or node.op_type != "Sub" or node.inputs[0] is None:
        return scores
    shift = node.inputs[1]
    if shift is None or shift.shape is None or len(shift.shape) <= axis or shift.shape[axis] != 1:
        return scores
    return node.inputs[0]
