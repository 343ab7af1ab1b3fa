"""Nodes that compute each row of an axis by itself, and what they read for some of the rows.

A row is a slice of a value at one index of an axis, the token axis say.

1. Elementwise nodes read the same rows of each operand that has the axis; one that is broadcast
   along it is read whole.
2. Norms, Softmax and reductions read the same rows unless they run along the axis.
3. A product reads the same rows of its left operand and all of its right one.
4. Transpose, Reshape, Squeeze, Unsqueeze and Concat move the axis, if it stays an axis of its own.
5. Attention reads those rows of its queries and of its mask, and all keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from attn_export.attention.layout import constant
from attn_export.attention.sizes import plain, sizes

ELEMENTWISE = frozenset({
    "Abs", "Add", "Cast", "Celu", "Clip", "Div", "Elu", "Erf", "Exp", "FastGelu", "Gelu",
    "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg",
    "Pow", "QuickGelu", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish",
    "Tanh", "Where",
})  # fmt: skip
DOMAINS = ("", "ai.onnx", "com.microsoft")
MASK = 3


@dataclass(frozen=True)
class Rows:
    """Some rows of a value: these indices along this axis, negative ones from its end."""

    axis: int
    indices: tuple[int, ...]


Reads = list[Rows | None]
"""For each input of a node the rows that it reads; None where it reads the input whole."""


def reads(node: ir.Node, rows: Rows) -> Reads | None:
    """What `node` reads to compute these rows of each of its outputs; None where it mixes rows."""
    rule = _RULES.get(node.op_type)
    if node.domain not in DOMAINS or rule is None:
        return None
    try:
        return rule(node, rows)
    except ValueError:  # a rank that is not known
        return None


def _elementwise(node: ir.Node, rows: Rows) -> Reads | None:
    whole = sizes(node.outputs[0])
    found: Reads = []
    for value in node.inputs:
        if value is None:
            found.append(None)
            continue
        axis = rows.axis - (len(whole) - len(sizes(value)))
        size = sizes(value)[axis] if axis >= 0 else 1
        if size == whole[rows.axis]:
            found.append(replace(rows, axis=axis))
        elif size == 1:
            found.append(None)
        else:
            return None
    return found


def _along_last(node: ir.Node, rows: Rows) -> Reads | None:
    """Norms over the axes from one on, whose scale and bias have none but those."""
    rank = len(sizes(node.outputs[0]))
    first = node.attributes.get_int("axis", -1) % rank
    short = all(v is None or len(sizes(v)) <= rank - first for v in node.inputs[1:])
    return [rows, *[None] * (len(node.inputs) - 1)] if rows.axis < first and short else None


def _softmax(node: ir.Node, rows: Rows) -> Reads | None:
    axis = node.attributes.get_int("axis", -1) % len(sizes(node.outputs[0]))
    return [rows] if rows.axis != axis else None


def _reduced(node: ir.Node, rows: Rows) -> Reads | None:
    source = node.inputs[0]
    given = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = node.attributes.get_ints("axes", ()) if given is None else given.reshape(-1).tolist()
    if source is None or not axes or node.attributes.get_int("keepdims", 1) != 1:
        return None
    mixed = rows.axis in {int(axis) % len(sizes(source)) for axis in axes}
    return None if mixed else [rows, *[None] * (len(node.inputs) - 1)]


def _matmul(node: ir.Node, rows: Rows) -> Reads | None:
    left, right = node.inputs
    if left is None or right is None:
        return None
    rank, last = len(sizes(node.outputs[0])), len(sizes(right)) == 2
    is_row = rows.axis == rank - 2 or (last and rows.axis < rank - 2)
    return [rows, None] if is_row and len(sizes(left)) == rank else None


def _gemm(node: ir.Node, rows: Rows) -> Reads | None:
    if rows.axis != 0 or node.attributes.get_int("transA", 0) != 0:
        return None
    added = node.inputs[2] if len(node.inputs) > 2 else None
    broadcast = added is None or len(sizes(added)) < 2 or sizes(added)[0] == 1
    return [rows, None, None if broadcast else rows][: len(node.inputs)]


def _transpose(node: ir.Node, rows: Rows) -> Reads | None:
    rank = len(sizes(node.outputs[0]))
    perm = node.attributes.get_ints("perm", tuple(reversed(range(rank))))
    return [replace(rows, axis=perm[rows.axis])]


def _reshape(node: ir.Node, rows: Rows) -> Reads | None:
    """The axis with the same size behind as many rows; also Squeeze and Unsqueeze."""
    source = node.inputs[0]
    if source is None:
        return None
    before, after = sizes(source), sizes(node.outputs[0])
    lead = plain(math.prod(after[: rows.axis]))
    for axis, size in enumerate(before):
        if size == after[rows.axis] and plain(math.prod(before[:axis])) == lead:
            return [replace(rows, axis=axis), *[None] * (len(node.inputs) - 1)]
    return None


def _concat(node: ir.Node, rows: Rows) -> Reads | None:
    axis = node.attributes.get_int("axis", 0) % len(sizes(node.outputs[0]))
    return [rows] * len(node.inputs) if rows.axis != axis else None


def _attention(node: ir.Node, rows: Rows) -> Reads | None:
    """Standard Attention without a cache, of which nothing but the result is read.

    A causal flag is none to the last query, where there are as many queries as keys.
    """
    query, key = node.inputs[:2]
    given = [index for index, value in enumerate(node.inputs) if value is not None]
    read = [value for value in node.outputs[1:] if value.uses() or value.is_graph_output()]
    if query is None or key is None or max(given) > MASK or read or node.domain == "com.microsoft":
        return None
    tokens = 2 if len(sizes(query)) == 4 else 1
    if rows.axis != tokens:
        return None
    if node.attributes.get_int("is_causal", 0):
        count = sizes(query)[tokens]
        last = rows.indices in ((-1,), (count - 1,) if isinstance(count, int) else ())
        if not last or count != sizes(key)[tokens] or MASK in given:
            return None
    found: Reads = [rows, None, None]
    if MASK in given:
        given_mask = node.inputs[MASK]
        mask = () if given_mask is None else sizes(given_mask)
        if len(mask) < 2 or mask[-2] not in (1, sizes(query)[tokens]):
            return None
        found.append(None if mask[-2] == 1 else replace(rows, axis=len(mask) - 2))
    return found


_RULES: Mapping[str, Callable[[ir.Node, Rows], Reads | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "LayerNormalization": _along_last,
    "RMSNormalization": _along_last,
    "SimplifiedLayerNormalization": _along_last,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "ReduceMean": _reduced,
    "ReduceSum": _reduced,
    "ReduceMax": _reduced,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Concat": _concat,
    "Attention": _attention,
}
