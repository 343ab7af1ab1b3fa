"""Columns of a value: what the elements along its last axes are made from.

Head elements are split, paired, swapped and joined again along the last axes of a value, while
everything in front of these axes (batch, heads, tokens) stays as it is. An array of the shape of
the last axes then says for each element what it is: `take` moves such arrays through the nodes that
only rearrange, and leaves everything else to its caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.data import depends_on_input
from attn_export.attention.layout import constant
from attn_export.attention.sizes import sizes

Columns = NDArray[Any]  # dtype object
Evaluate = Callable[[ir.Value, int], Columns]
"""The columns of a value's last axes, as many of them as the number says."""


def tail(value: ir.Value, axes: int) -> tuple[int, ...] | None:
    """The sizes of the last axes; None where there are not so many, or one is not fixed."""
    if value.shape is None or len(value.shape) < axes or axes < 0:
        return None
    last = [size for size in value.shape[len(value.shape) - axes :] if isinstance(size, int)]
    return tuple(last) if len(last) == axes else None


def blank(shape: tuple[int, ...], make: Callable[[int], object]) -> Columns:
    """An array of objects; `make` is given the flat index."""
    found = np.empty(math.prod(shape), dtype=object)
    for index in range(found.size):
        found[index] = make(index)
    return found.reshape(shape)


@dataclass
class Origin:
    """From which element of what, and by which steps, an element along the last axes is made.

    Two elements with one origin are equal at every position, whatever the inputs hold.
    """

    _cut: dict[int, ir.Value] = field(default_factory=dict)
    _known: dict[tuple[int, int], Columns] = field(default_factory=dict)

    def sources(self) -> list[ir.Value]:
        """The values that the origins asked for begin at, constants and sizes left out."""
        return list(self._cut.values())

    def of(self, value: ir.Value, axes: int) -> Columns:
        """Something that can be compared, for each element of the last axes."""
        key = (id(value), axes)
        if key not in self._known:
            self._known[key] = self._find(value, axes)
        return self._known[key]

    def _find(self, value: ir.Value, axes: int) -> Columns:
        node, shape = value.producer(), tail(value, axes)
        array = constant(value)
        if array is not None and shape is not None:
            flat = np.ascontiguousarray(array.reshape(-1, math.prod(shape)).T)
            return blank(shape, lambda index: ("constant", flat[index].tobytes()))
        if node is None or shape is None or node.domain not in ("", "ai.onnx"):
            return self._begin(value, axes)
        moved = take(value, axes, self.of, keep_lead=False)
        if moved is not None:
            for source in node.inputs[1:] if node.op_type != "Concat" else ():
                if source is not None and depends_on_input(source):
                    self._cut[id(source)] = source
            return moved
        parts = [part for part in node.inputs if part is not None]
        if node.op_type not in ELEMENTWISE or any(_open(part, axes) for part in parts):
            return self._begin(value, axes)
        rows = [
            np.broadcast_to(self.of(part, min(axes, _rank(part))), shape).reshape(-1)
            for part in parts
        ]
        return blank(shape, lambda index: (node.op_type, *(row[index] for row in rows)))

    def _begin(self, value: ir.Value, axes: int) -> Columns:
        if depends_on_input(value):
            self._cut[id(value)] = value
        return blank(tail(value, axes) or (), lambda index: (id(value), axes, index))


ELEMENTWISE = ("Add", "Cast", "Cos", "Div", "Mul", "Neg", "Sin", "Sub")


def _open(value: ir.Value, axes: int) -> bool:
    """Whether a size among the last axes is not fixed."""
    own = min(axes, _rank(value))
    return own > 0 and tail(value, own) is None


def take(value: ir.Value, axes: int, evaluate: Evaluate, *, keep_lead: bool) -> Columns | None:
    """The columns of what a rearranging node makes; None where the node is none.

    Args:
        keep_lead: refuse nodes that change anything in front of the last axes.
    """
    node, shape = value.producer(), tail(value, axes)
    if node is None or shape is None or node.domain not in ("", "ai.onnx") or not node.inputs:
        return None
    source = node.inputs[0]
    step = _STEPS.get(node.op_type)
    if step is None or source is None or source.shape is None:
        return None
    found = step(node, value, source, axes, evaluate)
    if found is None:
        return None
    columns, source_axes = found
    if columns.shape != shape:
        return None
    if keep_lead:
        lead = sizes(source)[: _rank(source) - source_axes]
        if lead != sizes(value)[:-axes] or _picks_rows(node, source, source_axes):
            return None
    return columns


def _picks_rows(node: ir.Node, source: ir.Value, axes: int) -> bool:
    """What picks in front of the last axes may keep their sizes and still change their order."""
    axis = node.attributes.get_int("axis", 0) % _rank(source)
    return node.op_type == "GatherND" or (node.op_type == "Gather" and axis < _rank(source) - axes)


Step = Callable[[ir.Node, ir.Value, ir.Value, int, Evaluate], tuple[Columns, int] | None]


def _rank(value: ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)


def _last(axis: int, rank: int, axes: int) -> int | None:
    """An axis counted among the last ones; None where it lies in front of them."""
    axis = axis % rank - (rank - axes)
    return axis if axis >= 0 else None


def _regroup(
    node: ir.Node, value: ir.Value, source: ir.Value, axes: int, evaluate: Evaluate
) -> tuple[Columns, int] | None:
    shape = tail(value, axes) or ()
    for source_axes in range(1, _rank(source) + 1):
        before = tail(source, source_axes)
        if before is not None and math.prod(before) == math.prod(shape):
            return evaluate(source, source_axes).reshape(shape), source_axes
    return None


def _same(
    node: ir.Node, value: ir.Value, source: ir.Value, axes: int, evaluate: Evaluate
) -> tuple[Columns, int] | None:
    return evaluate(source, axes), axes


def _cast(
    node: ir.Node, value: ir.Value, source: ir.Value, axes: int, evaluate: Evaluate
) -> tuple[Columns, int] | None:
    return (evaluate(source, axes), axes) if source.dtype == value.dtype else None


def _expand(
    node: ir.Node, value: ir.Value, source: ir.Value, axes: int, evaluate: Evaluate
) -> tuple[Columns, int] | None:
    shape = tail(value, axes)
    if shape is None or tail(source, axes) is None:
        return None
    return np.broadcast_to(evaluate(source, axes), shape), axes


def _transpose(
    node: ir.Node, value: ir.Value, source: ir.Value, axes: int, evaluate: Evaluate
) -> tuple[Columns, int] | None:
    rank = _rank(source)
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(rank)[::-1]
    lead, last = list(perm)[: rank - axes], [axis - (rank - axes) for axis in perm][rank - axes :]
    if min(last) < 0 or tail(source, axes) is None:
        return None
    if lead != sorted(lead) and sizes(source)[: rank - axes] == sizes(value)[:-axes]:
        return None  # equal sizes hide that the lead is moved
    return evaluate(source, axes).transpose(last), axes


def _concat(
    node: ir.Node, value: ir.Value, source: ir.Value, axes: int, evaluate: Evaluate
) -> tuple[Columns, int] | None:
    axis = _last(node.attributes.get_int("axis", 0), _rank(value), axes)
    parts = [part for part in node.inputs if part is not None and tail(part, axes) is not None]
    if axis is None or len(parts) != len(node.inputs):
        return None
    return np.concatenate([evaluate(part, axes) for part in parts], axis), axes


def _split(
    node: ir.Node, value: ir.Value, source: ir.Value, axes: int, evaluate: Evaluate
) -> tuple[Columns, int] | None:
    axis = _last(node.attributes.get_int("axis", 0), _rank(value), axes)
    if axis is None:
        return (evaluate(source, axes), axes) if tail(source, axes) else None
    start = 0
    for output in node.outputs:
        shape = tail(output, axes)
        if shape is None or tail(source, axes) is None:
            return None
        if output is value:
            picked = np.arange(start, start + shape[axis])
            return evaluate(source, axes).take(picked, axis), axes
        start += shape[axis]
    return None


def _slice(
    node: ir.Node, value: ir.Value, source: ir.Value, axes: int, evaluate: Evaluate
) -> tuple[Columns, int] | None:
    if tail(source, axes) is None:
        return None
    along = constant(node.inputs[3]) if len(node.inputs) > 3 else np.arange(_rank(source))
    if along is None:
        return None
    cuts: list[slice] = [slice(None)] * axes
    for position, axis in enumerate(np.atleast_1d(along)):
        last = _last(int(axis), _rank(source), axes)
        if last is None:
            continue
        bounds = [constant(node.inputs[index]) for index in (1, 2)]
        steps = constant(node.inputs[4]) if len(node.inputs) > 4 else np.ones(axes, np.int64)
        if bounds[0] is None or bounds[1] is None or steps is None:
            return None
        start, end, step = (int(np.atleast_1d(a)[position]) for a in (bounds[0], bounds[1], steps))
        if step < 1:
            return None
        cuts[last] = slice(start, end, step)
    return evaluate(source, axes)[tuple(cuts)], axes


def _gather(
    node: ir.Node, value: ir.Value, source: ir.Value, axes: int, evaluate: Evaluate
) -> tuple[Columns, int] | None:
    axis = node.attributes.get_int("axis", 0) % _rank(source)
    index = constant(node.inputs[1])
    behind = _rank(source) - axis - 1
    if behind >= axes and tail(source, axes) is not None:
        return evaluate(source, axes), axes  # rows are picked, in front of the last axes
    if index is None or index.ndim > 1:
        return None
    source_axes = axes + 1 - index.ndim
    last = _last(axis, _rank(source), source_axes)
    if last is None or tail(source, source_axes) is None:
        return None
    return evaluate(source, source_axes).take(index.astype(np.int64), last), source_axes


def _gather_nd(
    node: ir.Node, value: ir.Value, source: ir.Value, axes: int, evaluate: Evaluate
) -> tuple[Columns, int] | None:
    """Rows picked by an index into the first axes, as `table[positions]` is exported."""
    indexed = tail(node.inputs[1], 1) if node.inputs[1] is not None else None
    if indexed is None or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    inside = _rank(source) - indexed[0] >= axes and tail(source, axes) is not None
    return (evaluate(source, axes), axes) if inside else None


_STEPS: dict[str, Step] = {
    "Cast": _cast,
    "Concat": _concat,
    "Expand": _expand,
    "Flatten": _regroup,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Identity": _same,
    "Reshape": _regroup,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _regroup,
    "Transpose": _transpose,
    "Unsqueeze": _regroup,
}
