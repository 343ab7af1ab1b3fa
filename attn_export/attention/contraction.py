"""One product of two values read as an einsum, whichever operators it is written with.

Axes carry labels. An axis of size 1 that is broadcast carries none, so that Unsqueeze and Expand
leave no trace. A label of the factors that the result does not have is summed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import onnx_ir as ir

from attn_export.attention.layout import constant
from attn_export.attention.sizes import Size, sizes

Labels = tuple[int | None, ...]


@dataclass(frozen=True)
class Factor:
    """A value and the label of each of its axes; None for an axis of size 1."""

    value: ir.Value
    labels: Labels

    def sizes(self) -> dict[int, Size]:
        """The size behind each label."""
        pairs = zip(self.labels, sizes(self.value), strict=True)
        return {label: size for label, size in pairs if label is not None}


class Labeller:
    """Gives out labels that were not used before."""

    def __init__(self) -> None:
        self._next = count()

    def name(self, value: ir.Value) -> Factor:
        """A value with a fresh label for each axis."""
        return self.drop_ones(Factor(value, tuple(next(self._next) for _ in sizes(value))))

    def drop_ones(self, factor: Factor) -> Factor:
        pairs = zip(factor.labels, sizes(factor.value), strict=True)
        return Factor(factor.value, tuple(None if size == 1 else name for name, size in pairs))

    def factors(self, result: Factor) -> tuple[float, list[Factor]]:
        """A number and the two values whose contraction is the result; none where it is none.

        Axes that are only moved and numbers that are only multiplied lie between; of each factor
        the moves are taken off, so that it is the value that they move.
        """
        scale, inner = self.peel(result)
        node = inner.value.producer()
        if node is None or node.domain not in ("", "ai.onnx"):
            return scale, []
        found = self._operands(node, inner)
        return scale, [self.strip(factor) for factor in found]

    def peel(self, result: Factor) -> tuple[float, Factor]:
        """Take off what only moves axes or multiplies by a number."""
        scale = 1.0
        inner = self.strip(result)
        while (step := _scaled(inner.value)) is not None:
            number, value = step
            scale *= number
            inner = self.strip(Factor(value, inner.labels))
        return scale, inner

    def strip(self, factor: Factor) -> Factor:
        """The value behind nodes that only move axes."""
        while True:
            node = factor.value.producer()
            source = node.inputs[0] if node is not None and node.inputs else None
            if node is None or source is None or source.shape is None:
                return factor
            labels = _before(node, factor, len(source.shape))
            if labels is None:
                return factor
            factor = self.drop_ones(Factor(source, labels))

    def _operands(self, node: ir.Node, result: Factor) -> list[Factor]:
        values = [value for value in node.inputs if value is not None]
        if any(value.shape is None for value in values):
            return []
        if node.op_type == "ReduceSum":
            inner = self.before_sum(result)
            product = inner.value.producer() if inner is not None else None
            if inner is None or product is None or product.op_type != "Mul":
                return []
            return self._operands(product, inner)
        if len(values) != 2:
            return []
        if node.op_type == "Mul":
            labels: Iterator[Labels] = iter([result.labels, result.labels])
        elif node.op_type == "MatMul" and min(len(value.shape or ()) for value in values) > 1:
            (*lead, row, column), summed = result.labels, next(self._next)
            labels = iter([(*lead, row, summed), (*lead, summed, column)])
        elif node.op_type == "Einsum":
            labels = iter(self._einsum(node, result))
        else:
            return []
        aligned = [Factor(v, _last(names, v)) for v, names in zip(values, labels, strict=False)]
        return [self.drop_ones(factor) for factor in aligned]

    def before_sum(self, result: Factor) -> Factor | None:
        """What a ReduceSum adds up; None where it is none."""
        node = result.value.producer()
        if node is None or node.op_type != "ReduceSum" or len(node.inputs) < 2:
            return None
        source, axes = node.inputs[0], constant(node.inputs[1])
        if axes is None or source is None or source.shape is None:
            return None
        rank = len(source.shape)
        gone = {int(axis) % rank for axis in axes.reshape(-1)}
        keepdims = node.attributes.get_int("keepdims", 1)
        kept = iter(result.labels)
        labels: list[int | None] = []
        for axis in range(rank):
            if axis in gone and keepdims:
                next(kept)
            labels.append(next(self._next) if axis in gone else next(kept))
        return self.drop_ones(Factor(source, tuple(labels)))

    def _einsum(self, node: ir.Node, result: Factor) -> list[Labels]:
        equation = node.attributes["equation"].as_string().replace(" ", "")
        terms, arrow, out = equation.partition("->")
        if not arrow or "." in equation or len(out) != len(result.labels):
            return []
        names: dict[str, int | None] = dict(zip(out, result.labels, strict=True))
        for letter in terms.replace(",", ""):
            names.setdefault(letter, next(self._next))
        return [tuple(names[letter] for letter in term) for term in terms.split(",")]


def _last(labels: Labels, value: ir.Value) -> Labels:
    """Broadcasting aligns the last axes."""
    rank = len(value.shape or ())
    return labels[len(labels) - rank :] if rank <= len(labels) else (None,) * rank


def _scaled(value: ir.Value) -> tuple[float, ir.Value] | None:
    """(number, x) for x * number, number * x and x / number."""
    node = value.producer()
    if node is None or node.op_type not in ("Mul", "Div") or node.domain not in ("", "ai.onnx"):
        return None
    first, second = node.inputs
    options: Sequence[tuple[ir.Value | None, ir.Value | None]] = [(first, second)]
    if node.op_type == "Mul":
        options = [(first, second), (second, first)]
    for x, factor in options:
        number = constant(factor)
        if x is not None and number is not None and number.size == 1:
            scalar = float(number.reshape(-1)[0])
            if node.op_type == "Mul":
                return scalar, x
            return (1 / scalar, x) if scalar else None
    return None


def _before(node: ir.Node, after: Factor, rank: int) -> Labels | None:
    """The labels of the input of a node that moves axes; None for any other node."""
    labels = after.labels
    if node.op_type == "Identity":
        return labels
    if node.op_type == "Transpose":
        perm = list(node.attributes.get_ints("perm", list(range(rank))[::-1]))
        return tuple(labels[perm.index(axis)] for axis in range(rank))
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None:
        return None
    if node.op_type == "Unsqueeze":
        added = {int(axis) % len(labels) for axis in axes.reshape(-1)}
        return tuple(label for axis, label in enumerate(labels) if axis not in added)
    if node.op_type == "Squeeze":
        dropped, kept = {int(axis) % rank for axis in axes.reshape(-1)}, iter(labels)
        return tuple(None if axis in dropped else next(kept) for axis in range(rank))
    return None
