"""The common frame (B, N, S, T) of one attention, whatever shapes its parts pass through.

People fold heads into the batch, split windows off it, or put queries behind keys, and back again.
Each value between the two products is a view on the frame; what is added or selected there, such
as a mask, is pulled back to the frame through that view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul

import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.layout import Atom, View, atoms, identity, regroup, step, trace
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.sizes import Size, plain, sizes
from attn_export.attention.written.softmaxes import Softmax
from attn_export.attention.written.steps import Move, Step
from attn_export.attention.written.weighing import Weighing


@dataclass(frozen=True)
class Frame:
    """Where everything lies.

    Attributes:
        sizes: (B, N, S, T).
        swapped: whether the first product is (..., T, S): keys times transposed queries.
        at_steps: the view on the frame of the scores in front of each step.
        at_moves: the view of the weights after 0, 1, ... layout nodes.
        lead, value_lead: leading sizes of the first and the second product.
    """

    sizes: tuple[Size, Size, Size, Size]
    swapped: bool
    at_steps: tuple[View, ...]
    at_moves: tuple[View, ...]
    lead: tuple[Size, ...]
    value_lead: tuple[Size, ...]


def frame(product: ir.Node, steps: list[Step], found: Softmax, weighing: Weighing) -> Frame:
    """Lay all parts of an attention into one frame.

    Raises:
        NotLowerable: the softmax is not over keys, or leading axes change their order.
    """
    scores = product.outputs[0]
    shape = sizes(scores)
    if len(shape) < 2:
        raise NotLowerable(Reason.LAYOUT, "its scores are a vector")
    own = identity(scores)
    _, last = _walk(own, steps)
    over = last.axes[found.axis]
    rank = len(shape)
    if over == atoms(rank - 1, shape[-1]):
        swapped = False
    elif over == atoms(rank - 2, shape[-2]):
        swapped = True
    else:
        raise NotLowerable(Reason.NOT_EXPRESSIBLE, "its softmax is not over the keys of a product")
    query, key = (shape[-1], shape[-2]) if swapped else (shape[-2], shape[-1])
    value_lead = sizes(weighing.product.outputs[0])[:-2]
    batch, heads = _batch_and_heads(shape[:-2], value_lead, product.inputs[0])
    root = ir.Value(name="frame")
    target = (batch, heads, query, key)
    whole = View(root, (atoms(0, batch), atoms(1, heads)), (0,) * 4)
    lead = regroup(whole, shape[:-2])
    if lead is None:
        raise NotLowerable(Reason.LAYOUT, "its leading axes are not batch and heads")
    rows_columns = (atoms(3, key), atoms(2, query)) if swapped else (atoms(2, query), atoms(3, key))
    start = View(root, lead.axes + rows_columns, (0,) * 4)
    at_steps, view = _walk(start, steps)
    at_moves = [view]
    for node in weighing.moves:
        view = _moved(view, node)
        at_moves.append(view)
    _check_weighing(view, weighing, target, value_lead)
    return Frame(target, swapped, tuple(at_steps), tuple(at_moves), shape[:-2], value_lead)


def _walk(view: View, steps: list[Step]) -> tuple[list[View], View]:
    seen = []
    for item in steps:
        seen.append(view)
        if isinstance(item, Move):
            view = _moved(view, item.node)
    return seen, view


def _moved(view: View, node: ir.Node) -> View:
    moved = step(view, node)
    if moved is None:
        raise NotLowerable(Reason.LAYOUT, f"its scores go through a {node.op_type} that mixes axes")
    return moved


def _batch_and_heads(
    lead: tuple[Size, ...], value_lead: tuple[Size, ...], query: ir.Value | None
) -> tuple[Size, Size]:
    for candidate in (lead, value_lead):
        if len(candidate) == 2:
            return candidate[0], candidate[1]
    if len(lead) == 1 and query is not None:
        folded = trace(query).axes[0]  # (batch * heads), folded for a batched product
        if len(folded) == 2:
            return folded[0].size, folded[1].size
    if len(lead) < 2:
        return (lead[0] if lead else 1), 1
    return plain(reduce(mul, lead[:-1])), lead[-1]


def _check_weighing(
    view: View, weighing: Weighing, target: tuple[Size, ...], value_lead: tuple[Size, ...]
) -> None:
    """The second product sums over keys, and its leading axes are the first one's."""
    summed, kept = (-1, -2) if weighing.position == 0 else (-2, -1)
    if view.axes[summed] != atoms(3, target[3]) or view.axes[kept] != atoms(2, target[2]):
        raise NotLowerable(Reason.LAYOUT, "its weights do not meet the values along the keys")
    whole = View(view.root, (atoms(0, target[0]), atoms(1, target[1])), view.offset)
    expected = regroup(whole, value_lead)
    if expected is None or expected.axes != view.axes[:-2] or any(view.offset):
        raise NotLowerable(Reason.LAYOUT, "its weights lie in another order than its values")


def pull(b: Builder, value: ir.Value, view: View, target: tuple[Size, ...]) -> ir.Value:
    """A value that broadcasts against `view`, so that it broadcasts against the frame: rank 4.

    Raises:
        NotLowerable: its sizes are neither 1 nor those of the view.
    """
    if view.axes == tuple(atoms(axis, size) for axis, size in enumerate(target)):
        return value
    own = sizes(value)
    lead = len(view.axes) - len(own)
    row: list[Atom] = []
    present: list[bool] = []
    for axis, parts in enumerate(view.axes):
        size = own[axis - lead] if axis >= lead else 1
        whole = plain(reduce(mul, (atom.size for atom in parts), 1))
        if lead < 0 or size not in (1, whole):
            raise NotLowerable(Reason.MASK, "its mask does not broadcast against its scores")
        row += parts
        present += [size != 1] * len(parts)
    order = [index for axis in range(4) for index in _outer_to_inner(row, axis)]
    flat: list[Size] = [atom.size if here else 1 for atom, here in zip(row, present, strict=True)]
    value = b.transpose(b.reshape(value, flat), order) if row else value
    groups = [[index for index in order if row[index].axis == axis] for axis in range(4)]
    mixed = {i for group in groups if any(present[i] for i in group) for i in group}
    if any(not present[index] for index in mixed):
        value = b.expand(value, [row[i].size if i in mixed else 1 for i in order])
    return b.reshape(
        value,
        [size if mixed & set(group) else 1 for size, group in zip(target, groups, strict=True)],
    )


def push(b: Builder, value: ir.Value, view: View, target: Sequence[Size]) -> ir.Value:
    """A whole (B, N, S, T) value as it lies in a view on the frame, of the sizes `target`.

    Raises:
        NotLowerable: the view is a part of the frame.
    """
    row = [atom for axis in view.axes for atom in axis]
    order = [index for axis in range(4) for index in _outer_to_inner(row, axis)]
    parts = [row[index].size for index in order]
    if any(view.offset) or plain(reduce(mul, parts, 1)) != plain(reduce(mul, sizes(value), 1)):
        raise NotLowerable(Reason.WEIGHTS_USED, "a part of its weights is used elsewhere")
    apart = b.transpose(b.reshape(value, parts), [order.index(i) for i in range(len(order))])
    return b.reshape(apart, target)


def _outer_to_inner(row: list[Atom], axis: int) -> list[int]:
    """Positions of a root axis's atoms; each inner one spans a step of the next outer one."""
    left = [index for index, atom in enumerate(row) if atom.axis == axis]
    stride: Size = 1
    ordered: list[int] = []
    while left:
        inner = next((index for index in left if row[index].stride == stride), None)
        if inner is None:
            raise NotLowerable(Reason.LAYOUT, "its scores are taken apart in a way not followed")
        left.remove(inner)
        ordered.insert(0, inner)
        stride = plain(row[inner].size * stride)
    return ordered
