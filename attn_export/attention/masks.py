"""What a mask is made of: which of its numbers may block, and where its proof begins."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
import onnx_ir as ir

from attn_export.attention.data import dependent, inputs_behind, subgraphs, unique, walk

BLOCKING = -1e4
"""A number at or below this blocks a key: exp of it is 0 next to any real score."""

CARRIERS = {  # the inputs whose numbers come out again, added, chosen or moved
    **dict.fromkeys(
        ("CastLike", "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
         "Identity", "Neg", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Reshape",
         "Slice", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze"), (0,),
    ),
    **dict.fromkeys(("Add", "Clip", "Concat", "Div", "Max", "Min", "Mul", "Sub", "Sum"), None),
    "Cast": (0,), "Pad": (0, 2), "ScatterElements": (0, 2), "ScatterND": (0, 2), "Where": (1, 2),
}  # fmt: skip

ORDINARY = {  # finite numbers for finite inputs, and not made to block anything
    "Abs", "Attention", "BatchNormalization", "Conv", "Cos", "Einsum", "Erf", "Exp", "Gelu", "Gemm",
    "GlobalAveragePool", "GroupNormalization", "HardSigmoid", "InstanceNormalization",
    "LayerNormalization", "LpNormalization", "MatMul", "MultiHeadAttention", "RMSNormalization",
    "Relu", "RotaryEmbedding", "Sigmoid", "Sin", "SkipLayerNormalization", "Softmax", "Softplus",
    "Sqrt", "Tanh",
}  # fmt: skip


class Made(Enum):
    """What the numbers of a value may come from."""

    ORDINARY = "a product, a norm or the like"
    CHOICE = "integers or truth values"
    ANYTHING = "an input, a large constant, or an operator that is not known here"


def lowest(like: ir.Value) -> float:
    """The most negative number of a value's dtype; of float32 where that is not known."""
    return float((like.dtype or ir.DataType.FLOAT).min)


def made_of(value: ir.Value, infinite: bool = True) -> set[Made]:
    """Where the numbers of a float value come from; small constants count for nothing.

    Args:
        infinite: whether a constant's infinities count.
    """
    found: set[Made] = set()

    def onward(current: ir.Value) -> Sequence[ir.Value | None]:
        tensor, node = ir.convenience.get_const_tensor(current), current.producer()
        if tensor is not None:
            numbers = np.asarray(tensor.numpy(), np.float64)
            small = np.abs(numbers) < -BLOCKING  # its sign may turn on the way
            if not (small if infinite else small | np.isinf(numbers)).all():
                found.add(Made.ANYTHING)
        elif current.dtype is not None and not current.dtype.is_floating_point():
            found.add(Made.CHOICE)
        elif node is not None and node.op_type in CARRIERS:
            carried = CARRIERS[node.op_type]
            return [v for i, v in enumerate(node.inputs) if carried is None or i in carried]
        else:
            ordinary = node is not None and node.op_type in ORDINARY
            found.add(Made.ORDINARY if ordinary else Made.ANYTHING)
        return ()

    for _ in walk([value], onward):
        pass
    return found


def may_block(bias: ir.Value) -> bool:
    """Whether an additive mask may hold -inf or the most negative number."""
    return Made.ANYTHING in made_of(bias)


def may_hold_lowest(bias: ir.Value) -> bool:
    """Whether an additive mask may hold the most negative number, or one near it that is finite."""
    return Made.ANYTHING in made_of(bias, infinite=False)


def mask_sources(mask: ir.Value) -> list[ir.Value]:
    """Where a mask is cut off for its proof.

    Nowhere, where it is made of weights and sizes alone. At the integer and boolean inputs that it
    is made from: what they can block is what the model can block. Ordinary numbers that are added,
    as products of queries with positions, are cut where they are ready: whole layers may stand
    between them and token ids. At the mask itself in every other case, which may then hold
    anything: where a float input is a part of it, or has a say in what is blocked.
    """
    discrete = not any(_is_float(v) for v in inputs_behind(mask))
    data = dependent(mask)
    found: list[ir.Value] = []
    seen: set[tuple[int, bool]] = set()
    todo = [(mask, True)]
    while todo:
        value, numbers = todo.pop()  # numbers: it reaches the mask as numbers, not as a choice
        if (id(value), numbers) in seen or id(value) not in data:
            continue
        seen.add((id(value), numbers))
        node, floating = value.producer(), _is_float(value)
        ends = node is None or bool(subgraphs(node))
        if floating and (ends or not (numbers or discrete)):
            return [mask]
        if node is None or ends or (floating and numbers and made_of(value) == {Made.ORDINARY}):
            found.append(value)
        else:
            todo += [(v, numbers and floating) for v in node.inputs if v is not None]
    return unique(found)


def cut_sources(values: Sequence[ir.Value]) -> list[ir.Value]:
    """Where values that act on one attention together are cut off: as `mask_sources`, jointly.

    A mask and a guard that are made from one value are cut at that value, lest they be drawn apart.
    Biases that block nothing may be: any numbers will do for them.
    """
    sources = [mask_sources(value) for value in values]
    apart = [
        value
        for value, cut in zip(values, sources, strict=True)
        if cut == [value] and (value.dtype == ir.DataType.BOOL or may_block(value))
    ]
    found = [source for cut in sources for source in cut]
    meeting = _meeting(apart) if len(apart) > 1 else []
    if meeting:
        found = [v for v in found if all(v is not value for value in apart)] + meeting
    return unique(found)


def _meeting(values: Sequence[ir.Value]) -> list[ir.Value]:
    """The last values that all of these are made from, if they are made from nothing else."""
    behind = [dependent(value) for value in values]
    shared = set(behind[0]).intersection(*behind[1:])
    last = {
        key: behind[0][key]
        for key in shared
        if not any(id(out) in shared for use in behind[0][key].uses() for out in use.node.outputs)
    }

    def onward(value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        inputs = [] if node is None or id(value) in last else node.inputs
        return [v for v in inputs if v is not None and any(id(v) in b for b in behind)]

    ends = [v for v in walk(values, onward) if v.producer() is None and id(v) not in last]
    return [] if ends else list(last.values())


def _is_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()
