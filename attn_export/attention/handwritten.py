"""Attention written by hand: softmax(scale * Q K^T [+ mask]) V out of MatMul and Softmax nodes.

Walking up from a softmax, in the order that standard Attention computes them in reverse:

1. mask: Add of another value, or Where with a large negative constant; at most one of them.
2. softcap: c * tanh(x / c).
3. scale: Mul or Div by one constant, on the scores, on Q, on K, or on several of them.
4. the product of Q and the transposed K.

Anything else between is named as the reason why the softmax stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from attn_export.attention.layout import constant
from attn_export.attention.reasons import NotLowerable, Reason

BLOCKING = -1e4  # a constant at or below this blocks a key: exp of it is 0 next to any real score
PLAIN = {"Identity", "Cast", "Dropout"}
PASSED = {*PLAIN, "Add", "Div", "Mul", "Tanh", "Where"}


@dataclass
class Parts:
    """What one softmax is made of.

    Attributes:
        query: (..., S, H).
        key, key_perm: the key (..., T, H) is `key` with its axes in the order `key_perm`.
        value, value_perm: likewise the value (..., T, Hv).
        mask: additive, or bool where True keeps; None where there is none.
        inverted: whether the mask is bool and True blocks.
        output: the value that weights @ V ends in; (..., Hv, S) where `flipped`.
    """

    query: ir.Value
    key: ir.Value
    key_perm: tuple[int, ...]
    value: ir.Value
    value_perm: tuple[int, ...]
    mask: ir.Value | None
    inverted: bool
    scale: float
    softcap: float
    output: ir.Value
    flipped: bool


def parts(softmax: ir.Node) -> Parts:
    """Take a softmax apart.

    Raises:
        NotLowerable: it is no attention that the standard op expresses; the message says why.
    """
    weights = softmax.outputs[0]
    rank = 0 if weights.shape is None else len(weights.shape)
    if softmax.attributes.get_int("axis", -1) not in (-1, rank - 1):
        raise NotLowerable(Reason.NOT_EXPRESSIBLE, "its softmax is not over the last axis")
    product, flipped = _weighted(weights)
    value, value_perm = _untransposed(_input(product, 0 if flipped else 1), flipped)
    walk = _Walk()
    query, key_transposed = walk.up(_input(softmax, 0))
    key, perm = walk.key(key_transposed)
    return Parts(
        query=walk.scaled(query),
        key=key,
        key_perm=perm,
        value=value,
        value_perm=value_perm,
        mask=walk.mask,
        inverted=walk.inverted,
        scale=walk.scale,
        softcap=walk.softcap,
        output=product.outputs[0],
        flipped=flipped,
    )


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, f"{node.op_type} lacks an input")
    return value


def _weighted(weights: ir.Value) -> tuple[ir.Node, bool]:
    """The MatMul that weighs the values: weights @ V, or flipped, V^T @ weights^T."""
    guarded = _nan_guard(weights)
    if guarded is not None:
        return _weighted(guarded)
    if len(weights.uses()) != 1 or weights.is_graph_output():
        raise NotLowerable(Reason.WEIGHTS_USED, "its weights are used elsewhere")
    ((node, position),) = weights.uses()
    if node.op_type in PLAIN and _same_type(node):
        return _weighted(node.outputs[0])
    if node.op_type == "MatMul" and position == 0:
        return node, False
    if node.op_type == "Transpose" and _swaps_last_two(node):
        uses = list(node.outputs[0].uses())
        if len(uses) == 1 and uses[0].node.op_type == "MatMul" and uses[0].idx == 1:
            return uses[0].node, True
    raise NotLowerable(
        Reason.NOT_EXPRESSIBLE, f"its weights go through {node.op_type} before they meet the values"
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
    return guard.outputs[0] if same and _scalar(replacement) == 0.0 else None


def _swaps_last_two(node: ir.Node) -> bool:
    perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
    return perm[-2:] == [len(perm) - 1, len(perm) - 2] and perm[:-2] == sorted(perm[:-2])


def _untransposed(value: ir.Value, flipped: bool) -> tuple[ir.Value, tuple[int, ...]]:
    """A value whose last two axes are swapped if `flipped`: its base and the order of its axes."""
    if value.shape is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, f"the rank of '{value.name}' is unknown")
    perm = list(range(len(value.shape)))
    if not flipped:
        return value, tuple(perm)
    node = value.producer()
    if node is not None and node.op_type == "Transpose" and "perm" in node.attributes:
        value, perm = _input(node, 0), list(node.attributes["perm"].as_ints())
    perm[-2:] = reversed(perm[-2:])
    return value, tuple(perm)


def _same_type(node: ir.Node) -> bool:
    before = node.inputs[0]
    return before is not None and before.dtype == node.outputs[0].dtype


def _scalar(value: ir.Value | None) -> float | None:
    array = constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


class _Walk:
    """The way up from a softmax to the product of queries and keys."""

    def __init__(self) -> None:
        self.mask: ir.Value | None = None
        self.inverted = False
        self.scale, self.softcap = 1.0, 0.0

    def up(self, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Query and transposed key of the product that `value` comes from."""
        node = value.producer()
        if node is None:
            raise NotLowerable(Reason.NOT_EXPRESSIBLE, "its scores are an input")
        if node.op_type == "MatMul":
            return _input(node, 0), _input(node, 1)
        if node.op_type in PLAIN and _same_type(node):
            return self.up(_input(node, 0))
        if node.op_type == "Add":
            return self._add(node)
        if node.op_type == "Where":
            return self._where(node)
        if node.op_type in ("Mul", "Div"):
            return self._multiply(node)
        raise NotLowerable(Reason.NOT_EXPRESSIBLE, f"its scores go through {node.op_type}")

    def scaled(self, value: ir.Value) -> ir.Value:
        """Take a constant factor off a query or key."""
        node = value.producer()
        while node is not None and (factor := _factor(node)) is not None:
            self.scale *= factor[1]
            value = factor[0]
            node = value.producer()
        return value

    def key(self, transposed: ir.Value) -> tuple[ir.Value, tuple[int, ...]]:
        """The key behind (..., H, T), and the order of its axes that makes it (..., T, H)."""
        value, perm = _untransposed(self.scaled(transposed), True)
        return self.scaled(value), perm

    def _set_mask(self, mask: ir.Value, inverted: bool = False) -> None:
        if self.mask is not None:
            raise NotLowerable(Reason.MASK, "it has two masks")
        if self.scale != 1.0 or self.softcap:
            raise NotLowerable(Reason.MASK, "its mask is scaled or capped with the scores")
        self.mask, self.inverted = mask, inverted

    def _add(self, node: ir.Node) -> tuple[ir.Value, ir.Value]:
        for index in (0, 1):
            if _leads_to_product(_input(node, index)):
                self._set_mask(_input(node, 1 - index))
                return self.up(_input(node, index))
        raise NotLowerable(
            Reason.NOT_EXPRESSIBLE, "its scores are a sum without a product of queries and keys"
        )

    def _where(self, node: ir.Node) -> tuple[ir.Value, ir.Value]:
        for index, inverted in ((1, False), (2, True)):
            blocked = _scalar(_input(node, 3 - index))
            if blocked is not None and blocked <= BLOCKING:
                self._set_mask(_input(node, 0), inverted)
                return self.up(_input(node, index))
        raise NotLowerable(Reason.MASK, "its scores go through a Where that blocks nothing")

    def _multiply(self, node: ir.Node) -> tuple[ir.Value, ir.Value]:
        factor = _factor(node)
        if factor is None:
            raise NotLowerable(Reason.NOT_EXPRESSIBLE, "its scores are multiplied by a value")
        value, number = factor
        tanh = value.producer()
        if tanh is not None and tanh.op_type == "Tanh":
            return self._soft_cap(_input(tanh, 0), number)
        self.scale *= number
        return self.up(value)

    def _soft_cap(self, capped: ir.Value, cap: float) -> tuple[ir.Value, ir.Value]:
        node = capped.producer()
        factor = None if node is None else _factor(node)
        if self.scale != 1.0 or self.softcap or factor is None:
            raise NotLowerable(Reason.NOT_EXPRESSIBLE, "its scores go through Tanh")
        self.softcap = cap
        self.scale = cap * factor[1]  # tanh(x * f) = tanh(x * f * c / c)
        return self.up(factor[0])


def _factor(node: ir.Node) -> tuple[ir.Value, float] | None:
    """(x, c) of x * c, c * x or x / c with one constant c."""
    if node.op_type not in ("Mul", "Div"):
        return None
    left, right = _scalar(node.inputs[0]), _scalar(node.inputs[1])
    if right is not None and node.inputs[0] is not None:
        return node.inputs[0], right if node.op_type == "Mul" else 1 / right
    if left is not None and node.op_type == "Mul" and node.inputs[1] is not None:
        return node.inputs[1], left
    return None


def _leads_to_product(value: ir.Value) -> bool:
    """Whether scores lie behind a value: a product of two activations, past what `_Walk` passes."""
    node = value.producer()
    if node is None:
        return False
    if node.op_type == "MatMul":
        return all(constant(source) is None for source in node.inputs)
    if node.op_type not in PASSED:
        return False
    return any(source is not None and _leads_to_product(source) for source in node.inputs)
