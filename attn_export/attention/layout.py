"""Layout algebra: which element of its root does each element of a value come from?

Reshape, Transpose, Split, Slice, Squeeze and their like move elements without changing them. A
View records where each axis of a value lies in its root, so that two different chains of such
nodes that move the same elements are equal, whatever they look like.

1. An axis of a view is a row of atoms, outer to inner; an atom steps along one axis of the root.
2. Reshape splits and joins atoms; Transpose reorders axes; Slice, Split and Gather narrow an atom
   and add to the root axis's offset; Squeeze and Unsqueeze drop and add axes without atoms.
3. A step that this cannot express (a copy, a reversal, a size that does not divide) ends the walk:
   the value becomes its own root. Nothing is guessed.

Sizes are integers or sympy expressions of the graph's symbolic sizes, all of them positive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.sizes import Size, divide, plain, sizes

REPEAT = -1
"""The axis of an atom that stays where it is: the same elements again."""


@dataclass(frozen=True)
class Atom:
    """`size` steps of `stride` elements along `axis` of the root; none at all for REPEAT."""

    axis: int
    size: Size
    stride: int


Axis = tuple[Atom, ...]


@dataclass(frozen=True)
class View:
    """A value as a rearrangement of `root`'s elements.

    Attributes:
        axes: for each axis of the value, its atoms; an axis of size 1 has none.
        offset: for each axis of the root, the index at which the view starts.
    """

    root: ir.Value
    axes: tuple[Axis, ...]
    offset: tuple[int, ...]

    def covers(self, axis: int, root_axis: int) -> bool:
        """Whether `axis` of the view is the whole of `root_axis`, in order."""
        size = sizes(self.root)[root_axis]
        return self.offset[root_axis] == 0 and self.axes[axis] == atoms(root_axis, size)

    def indices(self, axes: tuple[int, ...], root_axis: int) -> NDArray[np.int64] | None:
        """Index along `root_axis` for each position of the given axes of the view.

        None unless these axes run along that root axis alone and their sizes are known.
        """
        found = np.full((1,) * len(axes), self.offset[root_axis], dtype=np.int64)
        for position, axis in enumerate(axes):
            steps = np.zeros(1, dtype=np.int64)
            for atom in self.axes[axis]:
                if atom.axis != root_axis or not isinstance(atom.size, int):
                    return None
                steps = (steps[:, None] + np.arange(atom.size) * atom.stride).reshape(-1)
            shape = [1] * len(axes)
            shape[position] = -1
            found = found + steps.reshape(shape)
        return found

    def same_as(self, other: View) -> bool:
        return self.root is other.root and self.axes == other.axes and self.offset == other.offset


def atoms(axis: int, size: Size) -> Axis:
    """A whole root axis; nothing for size 1."""
    return () if size == 1 else (Atom(axis, size, 1),)


def identity(value: ir.Value) -> View:
    return View(
        value, tuple(atoms(i, s) for i, s in enumerate(sizes(value))), (0,) * len(sizes(value))
    )


def trace(value: ir.Value, root: ir.Value | None = None) -> View:
    """The view of `value` on the farthest value that layout nodes alone lead to, or on `root`.

    Raises:
        ValueError: the rank of a value on the way is unknown.
    """
    node = value.producer()
    if value is root or node is None or not node.inputs or node.inputs[0] is None:
        return identity(value)
    if node.op_type not in _STEPS or node.domain not in ("", "ai.onnx"):
        return identity(value)
    moved = _STEPS[node.op_type](trace(node.inputs[0], root), node, value)
    return identity(value) if moved is None else moved


def step(view: View, node: ir.Node) -> View | None:
    """The view of what a layout node makes of a value that is `view`; None if it is none."""
    if node.op_type not in _STEPS or node.domain not in ("", "ai.onnx"):
        return None
    return _STEPS[node.op_type](view, node, node.outputs[0])


def chain(value: ir.Value) -> list[ir.Value]:
    """The value and those behind it, nearest first, up to the root of its view."""
    root, found = trace(value).root, [value]
    while found[-1] is not root:
        node = found[-1].producer()
        if node is None or node.inputs[0] is None:
            break
        found.append(node.inputs[0])
    return found


def arranged(view: View, groups: Sequence[Sequence[int]]) -> View:
    """The same elements; each group of the view's axes, outer to inner, is one axis."""
    axes = tuple(_join([atom for axis in group for atom in view.axes[axis]]) for group in groups)
    return View(view.root, axes, view.offset)


def existing(value: ir.Value, groups: Sequence[Sequence[int]]) -> ir.Value | None:
    """The farthest value behind `value` that holds its elements `arranged` in these groups."""
    wanted = arranged(trace(value), groups)
    found = [source for source in chain(value) if trace(source).same_as(wanted)]
    return found[-1] if found else None


def regroup(view: View, target: tuple[Size, ...]) -> View | None:
    """The view with its elements, in order, in the shape `target`."""
    rest = [atom for axis in view.axes for atom in axis]
    axes: list[Axis] = []
    for size in target:
        taken: list[Atom] = []
        while size != 1:
            if not rest:
                return None
            atom = rest.pop(0)
            if (left := divide(size, atom.size)) is not None:
                taken.append(atom)
                size = left
            elif (inner := divide(atom.size, size)) is not None and isinstance(inner, int):
                taken.append(Atom(atom.axis, size, atom.stride * inner))
                rest.insert(0, Atom(atom.axis, inner, atom.stride))
                size = 1
            else:
                return None
        axes.append(_join(taken))
    return None if rest else View(view.root, tuple(axes), view.offset)


def _join(row: list[Atom]) -> Axis:
    """Neighbouring atoms that step on without a gap are one."""
    joined: list[Atom] = []
    for atom in row:
        last = joined[-1] if joined else None
        if last and last.axis == atom.axis and last.stride == atom.stride * atom.size:
            joined[-1] = Atom(atom.axis, plain(last.size * atom.size), atom.stride)
        else:
            joined.append(atom)
    return tuple(joined)


def narrow(view: View, axis: int, start: int, count: int) -> View | None:
    """The view cut to [start, start + count) along one of its axes."""
    row = list(view.axes[axis])
    if not row:
        return view if (start, count) == (0, 1) else None
    if any(not isinstance(atom.size, int) for atom in row[1:]):
        return None
    inner = math.prod(int(atom.size) for atom in row[1:])
    if start % inner or count % inner:
        return _narrow_inside(view, axis, start, count, inner)
    first = row[0]
    steps = count // inner
    row[:1] = [] if steps == 1 else [Atom(first.axis, steps, first.stride)]
    return _moved(view, axis, tuple(row), first, start // inner)


def _narrow_inside(view: View, axis: int, start: int, count: int, inner: int) -> View | None:
    """A cut that stays within one step of the outermost atom, e.g. one head out of several."""
    first = view.axes[axis][0]
    outer = start // inner
    if (start + count - 1) // inner != outer:
        return None
    fixed = _moved(view, axis, view.axes[axis][1:], first, outer)
    return narrow(fixed, axis, start - outer * inner, count)


def _moved(view: View, axis: int, row: Axis, along: Atom, steps: int) -> View:
    axes = (*view.axes[:axis], row, *view.axes[axis + 1 :])
    offset = list(view.offset)
    offset[along.axis] += steps * along.stride
    return View(view.root, axes, tuple(offset))


def constant(value: ir.Value | None) -> NDArray[np.generic] | None:
    """The array of an initializer or Constant node, None for anything else."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def _ints(value: ir.Value | None) -> list[int] | None:
    array = constant(value)
    return None if array is None else [int(i) for i in np.atleast_1d(array)]


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _reshape(view: View, node: ir.Node, value: ir.Value) -> View | None:
    return regroup(view, sizes(value))


def _transpose(view: View, node: ir.Node, value: ir.Value) -> View | None:
    reverse = tuple(reversed(range(len(view.axes))))
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else reverse
    return View(view.root, tuple(view.axes[axis] for axis in perm), view.offset)


def _expand(view: View, node: ir.Node, value: ir.Value) -> View | None:
    """An axis of size 1, or a new one, is repeated: atoms that step nowhere."""
    before, after = sizes(node.inputs[0]) if node.inputs[0] is not None else (), sizes(value)
    lead = len(after) - len(before)
    axes: list[Axis] = [(Atom(REPEAT, size, 0),) if size != 1 else () for size in after[:lead]]
    for axis, (own, size) in enumerate(zip(before, after[lead:], strict=True)):
        if own != size and own != 1:
            return None
        axes.append(view.axes[axis] if own == size else (Atom(REPEAT, size, 0),))
    return View(view.root, tuple(axes), view.offset)


def _same(view: View, node: ir.Node, value: ir.Value) -> View | None:
    """Identity; Cast where it changes nothing."""
    before = node.inputs[0]
    kept = before is not None and before.dtype == value.dtype and sizes(before) == sizes(value)
    return view if kept else None


def _split(view: View, node: ir.Node, value: ir.Value) -> View | None:
    axis = node.attributes.get_int("axis", 0) % len(view.axes)
    start = 0
    for output in node.outputs:
        count = sizes(output)[axis]
        if not isinstance(count, int):
            return None
        if output is value:
            return narrow(view, axis, start, count)
        start += count
    return None


def _slice(view: View, node: ir.Node, value: ir.Value) -> View | None:
    starts, ends = _ints(_input(node, 1)), _ints(_input(node, 2))
    if starts is None or ends is None:
        return None
    axes = _ints(_input(node, 3)) if _input(node, 3) is not None else list(range(len(starts)))
    steps = _ints(_input(node, 4)) if _input(node, 4) is not None else [1] * len(starts)
    if axes is None or steps is None or any(step != 1 for step in steps):
        return None
    source = node.inputs[0]
    whole = sizes(source) if source is not None else ()
    found: View | None = view
    for start, end, axis in zip(starts, ends, axes, strict=True):
        size = whole[axis % len(whole)]
        if start == 0 and end >= (1 << 31) - 1:
            continue
        if found is None or not isinstance(size, int):
            return None
        first, last = (min(max(i + size if i < 0 else i, 0), size) for i in (start, end))
        found = narrow(found, axis % len(whole), first, last - first) if last > first else None
    return found


def _gather(view: View, node: ir.Node, value: ir.Value) -> View | None:
    axis = node.attributes.get_int("axis", 0) % len(view.axes)
    index = constant(_input(node, 1))
    source = node.inputs[0]
    size = sizes(source)[axis] if source is not None else None
    if index is None or index.ndim > 1 or not isinstance(size, int):
        return None
    steps = np.atleast_1d(index).astype(np.int64)
    steps = np.where(steps < 0, steps + size, steps)
    if not np.array_equal(steps, np.arange(steps[0], steps[0] + steps.size)):
        return None
    cut = narrow(view, axis, int(steps[0]), steps.size)
    return regroup(cut, sizes(value)) if cut is not None else None


_STEPS = {
    "Cast": _same,
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "Identity": _same,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _reshape,
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
}
