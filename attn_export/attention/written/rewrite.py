"""One standard Attention node for an attention that is written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.data import is_computed, unique
from attn_export.attention.lower.mask import kernel_mask
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.masks import cut_sources
from attn_export.attention.metadata import origin_of
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.sizes import Size, shape_of, sizes
from attn_export.attention.written.frame import Frame, frame, pull, push
from attn_export.attention.written.masking import Masking, masking
from attn_export.attention.written.softmaxes import Softmax
from attn_export.attention.written.steps import Bias, factor, source, way
from attn_export.attention.written.weighing import Guard, Weighing, weighing

NAME = "ai.onnx.Attention"
SOFTMAX = 3  # of qk_matmul_output_mode


@dataclass(frozen=True)
class Operand:
    """A query, key or value; `perm` orders its axes as (..., tokens, size)."""

    value: ir.Value
    perm: tuple[int, ...]
    scale: float

    @property
    def sizes(self) -> tuple[Size, ...]:
        own = sizes(self.value)
        return tuple(own[axis] for axis in self.perm)


def rewrite(found: Softmax, *, nan_rows: bool = False) -> Rewrite:
    """Query (B, N, S, H), key (B, K, T, H) and value (B, K, T, Hv) in front of one node.

    Specification: ONNX operator Attention, opset 23.

    Args:
        nan_rows: give NaN to a query that may see no key, as a softmax over -inf alone does.

    Raises:
        NotLowerable: it is no attention that the standard op expresses; the message says why.
    """
    weighed = weighing(found.weights)
    product, steps = way(found.scores)
    common = frame(product, steps, found, weighed)
    first, second = source(product, 0), source(product, 1)
    rows, columns = operand(first, False), operand(second, True)
    query, key = (columns, rows) if common.swapped else (rows, columns)
    value = operand(source(weighed.product, 1 - weighed.position), weighed.position == 1, False)
    operands = (query, key, value)
    b = Builder(str(found.node.name), origin_of(found.node), [o.value for o in operands])
    masked = masking(b, steps, common)
    guards = _guards(b, masked, weighed, common)
    q, k, v = _operands(b, common, query, key, value)
    q = _spread(b, q, masked)
    mask = masked.mask(b, q)
    new, attention = _attention(b, masked, common, q, k, v, mask, query.scale * key.scale)
    for guard, condition in guards:
        new = _guarded(b, new, guard, condition)
    also = _returned(b, attention, weighed, common, mask if nan_rows else None)
    if nan_rows:
        new = _nan_rows(b, new, mask)
    new = _as_before(b, new, weighed, common, sizes(v)[-1])
    attention.name = f"{found.node.name}/attention"
    if found.widened:
        precision = int(found.node.outputs[0].dtype or ir.DataType.FLOAT)
        attention.attributes["softmax_precision"] = ir.AttrInt64("softmax_precision", precision)
    old = weighed.product.outputs[0]
    new.shape, new.type = old.shape, old.type
    cut = cut_sources([*masked.sources, *(guard.condition for guard, _ in guards)])
    sources = [o.value for o in operands if is_computed(o.value)] + cut
    biases = {id(step.value) for step in steps if isinstance(step, Bias)}
    hostile = next((v for v in cut if id(v) in biases), None)
    return Rewrite(NAME, unique(sources), old, new, b.nodes, b.weights, hostile, also)


def operand(value: ir.Value, swapped: bool, scaled: bool = True) -> Operand:
    """A factor of a product without its constant factors and its last transpose.

    Args:
        swapped: it is (..., size, tokens).
        scaled: take constant factors off.
    """
    number = 1.0
    if value.shape is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, f"the rank of '{value.name}' is unknown")
    perm = list(range(len(value.shape)))
    if swapped:
        perm[-2:] = reversed(perm[-2:])
    while True:
        node = value.producer()
        off = factor(node) if scaled and node is not None else None
        if off is not None and off[0].shape is not None and len(off[0].shape) == len(perm):
            value, number = off[0], number * off[1]
        elif swapped and node is not None and node.op_type == "Transpose" and node.inputs[0]:
            reverse = tuple(reversed(range(len(perm))))
            order = node.attributes["perm"].as_ints() if "perm" in node.attributes else reverse
            value, perm, swapped = node.inputs[0], [order[axis] for axis in perm], False
        else:
            return Operand(value, tuple(perm), number)


def _operands(
    b: Builder, common: Frame, query: Operand, key: Operand, value: Operand
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value on the frame; one key and value for all heads stays one."""
    batch, heads = common.sizes[:2]
    lead = common.lead
    shared = len(lead) == 2 and lead == common.value_lead and heads != 1
    shared = shared and all(_padded(o.sizes[:-2], 2)[1:] == (1,) for o in (key, value))
    kept = (*lead[:-1], 1) if shared else None
    return (
        _on_frame(b, query, lead, (batch, heads)),
        _on_frame(b, key, kept or lead, (batch, 1 if shared else heads)),
        _on_frame(b, value, kept or common.value_lead, (batch, 1 if shared else heads)),
    )


def _padded(lead: Sequence[Size], rank: int) -> tuple[Size, ...]:
    return (1,) * (rank - len(lead)) + tuple(lead)


def _on_frame(
    b: Builder, part: Operand, lead: Sequence[Size], target: tuple[Size, Size]
) -> ir.Value:
    ordered = b.transpose(part.value, part.perm)
    tokens, size = part.sizes[-2:]
    own = _padded(part.sizes[:-2], len(lead))
    if len(own) != len(lead):
        raise NotLowerable(Reason.LAYOUT, "its queries, keys and values are not of one rank")
    ordered = b.reshape(ordered, (*own, tokens, size))
    ordered = b.expand(ordered, (*lead, tokens, size))
    return b.reshape(ordered, (*target, tokens, size))


def _spread(b: Builder, query: ir.Value, masked: Masking) -> ir.Value:
    for value, divides in masked.spreads:
        if sizes(value)[-1:] != (1,):
            raise NotLowerable(Reason.NOT_EXPRESSIBLE, "its scores have a factor for each key")
        query = b.op("Div" if divides else "Mul", [query, value], sizes(query))
    return query


def _attention(
    b: Builder, masked: Masking, common: Frame, q: ir.Value, k: ir.Value, v: ir.Value,
    mask: ir.Value | None, scale: float,
) -> tuple[ir.Value, ir.Node]:  # fmt: skip
    inputs: list[ir.Value | None] = [q, k, v]
    if mask is not None:
        mask, nodes, weights = kernel_mask(b.prefix, mask, q, k)
        b.nodes += nodes
        b.weights += weights
        inputs.append(mask)
    attributes: dict[str, float] = {"scale": masked.scale * scale}
    if masked.softcap:
        attributes["softcap"] = masked.softcap
    new = b.op("Attention", inputs, (*common.sizes[:3], sizes(v)[-1]), q.dtype, **attributes)
    return new, b.nodes[-1]


def _returned(
    b: Builder, attention: ir.Node, weighed: Weighing, common: Frame, nan_mask: ir.Value | None
) -> list[tuple[ir.Value, ir.Value]]:
    """Each value of weights that something else reads, with the node's own in its place.

    The node gives weights (B, N, S, T), 0 for a query that may see no key; NaN where `nan_mask`
    is given.
    """
    if not weighed.read:
        return []
    attention.resize_outputs(4)
    for unwanted in attention.outputs[1:3]:
        unwanted.name = ""
    attention.attributes["qk_matmul_output_mode"] = ir.AttrInt64("qk_matmul_output_mode", SOFTMAX)
    weights = attention.outputs[3]
    weights.shape, weights.type = shape_of(common.sizes), attention.outputs[0].type
    if nan_mask is not None:
        weights = _nan_rows(b, weights, nan_mask)
    pairs = []
    for old, moves in weighed.read:
        new = push(b, weights, common.at_moves[moves], sizes(old))
        new.type = old.type
        pairs.append((old, new))
    return pairs


def _guards(
    b: Builder, masked: Masking, weighed: Weighing, common: Frame
) -> list[tuple[Guard, ir.Value]]:
    """The guards that set whole rows of weights to 0, on the frame.

    One that sets single weights to 0 blocks those keys, and leaves a query without any key with 0.
    """
    rows = []
    for guard in weighed.guards:
        condition = pull(b, guard.condition, common.at_moves[guard.moves], common.sizes)
        if sizes(condition)[-1:] == (1,):
            rows.append((guard, condition))
        elif guard.multiplies:
            raise NotLowerable(
                Reason.NOT_EXPRESSIBLE, "its weights are multiplied by a value for each pair"
            )
        else:
            masked.block(b, guard.condition, guard.keeps, condition)
            masked.fill = -np.inf
    return rows


def _guarded(b: Builder, new: ir.Value, guard: Guard, condition: ir.Value) -> ir.Value:
    if guard.multiplies:
        return b.op("Mul", [new, condition], sizes(new))
    zero = b.number(0.0, new)
    parts = [new, zero] if guard.keeps else [zero, new]
    return b.op("Where", [condition, *parts], sizes(new), new.dtype)


def _nan_rows(b: Builder, new: ir.Value, mask: ir.Value | None) -> ir.Value:
    if mask is None:
        raise NotLowerable(Reason.BLOCKED_ROWS, "it blocks no row")
    rank = len(sizes(mask))
    shape = [*sizes(mask)[:-1], 1]
    axes = b.constant(np.array([rank - 1], dtype=np.int64))
    like = new.dtype or ir.DataType.FLOAT
    if mask.dtype == ir.DataType.BOOL:
        numbers = b.op("Cast", [mask], sizes(mask), like, to=int(like))
        best = b.op("ReduceMax", [numbers, axes], shape, keepdims=1)
        allowed = b.op("Cast", [best], shape, ir.DataType.BOOL, to=int(ir.DataType.BOOL))
        parts = [new, b.number(float("nan"), new)]
    else:
        best = b.op("ReduceMax", [mask, axes], shape, keepdims=1)
        allowed = b.op("IsInf", [best], shape, ir.DataType.BOOL, detect_positive=0)
        parts = [b.number(float("nan"), new), new]
    return b.op("Where", [allowed, *parts], sizes(new), new.dtype)


def _as_before(b: Builder, new: ir.Value, weighed: Weighing, common: Frame, size: Size) -> ir.Value:
    query = common.sizes[2]
    new = b.reshape(new, (*common.value_lead, query, size))
    if weighed.position == 1:
        rank = len(common.value_lead)
        new = b.transpose(new, [*range(rank), rank + 1, rank])
    return new
