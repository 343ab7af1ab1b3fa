"""From the product of queries and keys to the softmax, one step after the other.

Of a sum the side is taken that leads to a product; what is added to it is a mask or bias. A step
that no attention op computes is named in the refusal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attn_export.attention.data import depends_on_input
from attn_export.attention.layout import constant
from attn_export.attention.masks import BLOCKING
from attn_export.attention.reasons import NotLowerable, Reason

PLAIN = {"Identity", "Cast", "Dropout"}
LAYOUT = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"}
QUANTISED = {"QuantizeLinear", "DequantizeLinear", "QLinearMatMul", "MatMulInteger"}
LONGEST = 200
"""Nodes looked at before a softmax is given up: attention is written in a few dozen."""


@dataclass(frozen=True)
class Move:
    """A layout node on the way."""

    node: ir.Node


@dataclass(frozen=True)
class Factor:
    """Scores times a constant."""

    value: float


@dataclass(frozen=True)
class Spread:
    """Scores times, or over, a tensor that is the same for every key."""

    value: ir.Value
    divides: bool


@dataclass(frozen=True)
class Bias:
    """Scores plus, or minus, a value."""

    value: ir.Value
    negative: bool


@dataclass(frozen=True)
class Block:
    """Scores where `condition` is `keeps`, the number `fill` elsewhere."""

    condition: ir.Value
    keeps: bool
    fill: float


@dataclass(frozen=True)
class Cap:
    """cap * tanh(scores * factor)."""

    cap: float
    factor: float


Step = Move | Factor | Spread | Bias | Block | Cap
Way = tuple[ir.Node, list[Step]]
"""The MatMul of queries and keys, and the steps from it to the softmax."""


def way(scores: ir.Value) -> Way:
    """The way from a product of two activations; failing that, from a product with a constant.

    Raises:
        NotLowerable: there is none, or something stands between that no attention op computes.
    """
    try:
        return _Climb(True).up(scores)
    except NotLowerable as strict:
        try:
            return _Climb(False).up(scores)
        except NotLowerable:
            raise strict from None


class _Climb:
    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.visited = 0

    def up(self, value: ir.Value) -> Way:
        node = value.producer()
        self.visited += 1
        if node is None or self.visited > LONGEST:
            raise NotLowerable(Reason.NOT_EXPRESSIBLE, "its scores are no product that is in sight")
        if node.op_type == "MatMul":
            if self.strict and not all(v is not None and depends_on_input(v) for v in node.inputs):
                raise NotLowerable(
                    Reason.NOT_EXPRESSIBLE, "its scores are no product of queries and keys"
                )
            return node, []
        if node.op_type in PLAIN and _same_type(node):
            return self.up(source(node, 0))
        if node.op_type in LAYOUT:
            return self._then(source(node, 0), Move(node))
        if node.op_type in ("Add", "Sub"):
            return self._sum(node)
        if node.op_type == "Where":
            return self._where(node)
        if node.op_type in ("Mul", "Div"):
            return self._multiple(node)
        raise unexpressed(node, "scores")

    def _then(self, value: ir.Value, step: Step) -> Way:
        product, steps = self.up(value)
        return product, [*steps, step]

    def _sum(self, node: ir.Node) -> Way:
        refusal: NotLowerable | None = None
        for index in (0, 1) if node.op_type == "Add" else (0,):
            side, other = source(node, index), source(node, 1 - index)
            if constant(side) is not None:
                continue
            try:
                return self._then(side, Bias(other, negative=node.op_type == "Sub"))
            except NotLowerable as reason:
                refusal = refusal or reason
        raise refusal or NotLowerable(Reason.NOT_EXPRESSIBLE, "its scores are constant")

    def _where(self, node: ir.Node) -> Way:
        for index, keeps in ((1, True), (2, False)):
            fill = filled(source(node, 3 - index))
            if fill is not None and fill <= BLOCKING:
                return self._then(source(node, index), Block(source(node, 0), keeps, fill))
        raise NotLowerable(Reason.MASK, "its scores go through a Where that blocks nothing")

    def _multiple(self, node: ir.Node) -> Way:
        found = factor(node)
        if found is not None:
            value, number = found
            tanh = value.producer()
            if tanh is not None and tanh.op_type == "Tanh":
                return self._cap(source(tanh, 0), number)
            return self._then(value, Factor(number))
        for index in (0, 1) if node.op_type == "Mul" else (0,):
            other = source(node, 1 - index)
            if _last_size(other) == 1:
                return self._then(source(node, index), Spread(other, node.op_type == "Div"))
        raise NotLowerable(
            Reason.NOT_EXPRESSIBLE, "its scores are multiplied by a value for each pair"
        )

    def _cap(self, capped: ir.Value, cap: float) -> Way:
        node = capped.producer()
        found = None if node is None else factor(node)
        return self._then(*((capped, Cap(cap, 1.0)) if found is None else
                            (found[0], Cap(cap, found[1]))))  # fmt: skip


def unexpressed(node: ir.Node, what: str) -> NotLowerable:
    """The refusal for a node that stands where no attention op has anything."""
    if node.op_type in QUANTISED:
        return NotLowerable(Reason.QUANTISED, f"its {what} go through {node.op_type}")
    known = {
        "Conv": " (its heads are mixed)",
        "Concat": " (more keys, such as a sink, than there are values)",
        "Slice": " (more keys, such as a sink, than there are values)",
        "ScatterElements": " (keys are chosen by their scores)",
    }
    return NotLowerable(
        Reason.NOT_EXPRESSIBLE,
        f"its {what} go through {node.op_type}{known.get(node.op_type, '')}",
    )


def source(node: ir.Node, index: int) -> ir.Value:
    """An input that must be there."""
    value = node.inputs[index]
    if value is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, f"{node.op_type} lacks an input")
    return value


def scalar(value: ir.Value | None) -> float | None:
    """The number of a constant that holds one."""
    array = constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def filled(value: ir.Value | None) -> float | None:
    """The number that fills a whole constant, however it was spread."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type in ("Expand", "Cast", "CastLike", "Identity", "Unsqueeze"):
        return filled(node.inputs[0])
    if node is not None and node.op_type == "ConstantOfShape":
        tensor = node.attributes["value"].as_tensor() if "value" in node.attributes else None
        return 0.0 if tensor is None else float(tensor.numpy().reshape(-1)[0])
    array = constant(value)
    if array is None or array.size == 0 or not np.all(array == array.reshape(-1)[0]):
        return None
    return float(array.reshape(-1)[0])


def factor(node: ir.Node) -> tuple[ir.Value, float] | None:
    """(x, c) of x * c, c * x or x / c with one constant c."""
    if node.op_type not in ("Mul", "Div"):
        return None
    left, right = scalar(node.inputs[0]), scalar(node.inputs[1])
    if right is not None and right != 0 and node.inputs[0] is not None:
        return node.inputs[0], right if node.op_type == "Mul" else 1 / right
    if left is not None and node.op_type == "Mul" and node.inputs[1] is not None:
        return node.inputs[1], left
    return None


def _same_type(node: ir.Node) -> bool:
    before = node.inputs[0]
    return before is not None and before.dtype == node.outputs[0].dtype


def _last_size(value: ir.Value) -> object:
    return None if value.shape is None or not len(value.shape) else value.shape[-1]
