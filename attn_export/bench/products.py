"""How much arithmetic the matrix products of a graph are, at given sizes of its inputs.

A product of (M, K) with (K, N) counts 2 M K N floating-point operations, a convolution those of the
products that it is, an attention op those of Q K^T and of the weights with V (and of its
projections, where it holds them). All else is left out: norms, softmax and activations are a few
per cent of a transformer's arithmetic, and the share of a matrix-multiply peak is asked for.
Needs numpy and onnx alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from attn_export.bench.shapes import Shape, Shapes, infer
from attn_export.errors import FileError, one_line


@dataclass(frozen=True)
class Products:
    """What was counted.

    Attributes:
        flops: floating-point operations of one call.
        uncounted: matrix products whose sizes are not known, as operator to how many.
    """

    flops: int
    uncounted: Mapping[str, int]


class _UnknownError(Exception):
    """A size that counting needs is not known."""


def count(path: Path, inputs: Shapes) -> Products:
    """The products of the .onnx file at `path`, called with inputs of these shapes.

    Raises:
        FileError: the file does not parse.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own, or the system's
        raise FileError(f"{path} does not load ({one_line(error)})", "export it again") from error
    return count_model(model, inputs)


def count_model(model: onnx.ModelProto, inputs: Shapes) -> Products:
    """As `count`; the model itself is not changed."""
    shapes = infer(model, inputs)
    opaque = UNKNOWN | {function.name for function in model.functions}
    flops, uncounted = 0, dict[str, int]()
    for node, inside in _nodes(model.graph):
        if node.op_type not in COUNTERS and node.op_type not in opaque:
            continue
        try:
            if inside or node.op_type in opaque:  # how often a body runs is not known
                raise _UnknownError
            flops += COUNTERS[node.op_type](_Sized(node, shapes))
        except _UnknownError:
            uncounted[node.op_type] = uncounted.get(node.op_type, 0) + 1
    return Products(flops, uncounted)


def _nodes(graph: onnx.GraphProto, inside: bool = False) -> Iterator[tuple[onnx.NodeProto, bool]]:
    """Each node, and whether it lies in the body of an If, a Loop or a Scan."""
    for node in graph.node:
        yield node, inside
        for attribute in node.attribute:
            for body in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                yield from _nodes(body, True)


class _Sized:
    """A node with the shapes of what it reads and writes."""

    def __init__(self, node: onnx.NodeProto, shapes: Shapes) -> None:
        self._node, self._shapes = node, shapes

    def input(self, index: int) -> Shape:
        """Raises _UnknownError where the shape is not known, or there is no such input."""
        return self._shape(self._node.input, index)

    def output(self, index: int = 0) -> Shape:
        return self._shape(self._node.output, index)

    def _shape(self, names: Sequence[str], index: int) -> Shape:
        name = names[index] if index < len(names) else ""
        if not name or name not in self._shapes:
            raise _UnknownError
        return self._shapes[name]

    def has(self, index: int) -> bool:
        return index < len(self._node.input) and bool(self._node.input[index])

    def number(self, name: str, default: int = 0) -> int:
        return next((int(a.i) for a in self._node.attribute if a.name == name), default)

    def text(self, name: str) -> str:
        return next((a.s.decode() for a in self._node.attribute if a.name == name), "")

    def numbers(self, name: str) -> Shape:
        return next((tuple(a.ints) for a in self._node.attribute if a.name == name), ())


def _matmul(node: _Sized) -> int:
    return 2 * math.prod(node.output()) * node.input(0)[-1]


def _gemm(node: _Sized) -> int:
    rows = node.input(0)
    return 2 * math.prod(node.output()) * rows[0 if node.number("transA") else 1]


def _conv(node: _Sized, weight: int = 1) -> int:
    kernel = node.input(weight)  # (M, C / group, ...)
    return 2 * math.prod(node.output()) * math.prod(kernel[1:])


def _conv_transpose(node: _Sized) -> int:
    return 2 * math.prod(node.input(0)) * math.prod(node.input(1)[1:])


def _einsum(node: _Sized) -> int:
    left, _, _ = node.text("equation").replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    terms = left.split(",")
    if "." in left or len(terms) != 2:
        raise _UnknownError
    for index, letters in enumerate(terms):
        sizes.update(zip(letters, node.input(index), strict=True))
    return 2 * math.prod(sizes.values())


def _attention(node: _Sized) -> int:
    """ai.onnx Attention, or com.microsoft Attention, which holds its projections."""
    if node.number("num_heads"):
        batch, tokens, width = node.input(0)
        parts = node.numbers("qkv_hidden_sizes") or (node.input(1)[1] // 3,) * 3
        past = node.input(4)[3] if node.has(4) else 0
        projections = tokens * width * sum(parts)
        scores = tokens * (tokens + past) * (parts[0] + parts[2])
        return 2 * batch * (projections + scores)
    query, key, value = (_heads_apart(node, i) for i in range(3))
    past = node.input(4)[2] if node.has(4) else 0
    rows = math.prod(query[:3])  # B, N, S
    return 2 * rows * (key[2] + past) * (query[3] + value[3])


def _heads_apart(node: _Sized, index: int) -> Shape:
    """(B, N, S, H) of an operand of the standard op that may be (B, S, N * H)."""
    shape = node.input(index)
    if len(shape) == 4:
        return shape
    heads = node.number("kv_num_heads" if index else "q_num_heads")
    return shape[0], heads, shape[1], shape[2] // heads


def _multi_head_attention(node: _Sized) -> int:
    """com.microsoft MultiHeadAttention; keys and values may lie heads first."""
    batch, tokens, width = node.input(0)
    key, heads = node.input(1), node.number("num_heads")
    keys = key[2] if len(key) == 4 else key[1]
    keys += node.input(6)[2] if node.has(6) else 0
    value = node.input(2)
    return 2 * batch * tokens * keys * (width + (heads * value[3] if len(value) == 4 else value[2]))


def _group_query_attention(node: _Sized) -> int:
    """com.microsoft GroupQueryAttention; the query may hold the keys and values as well."""
    batch, tokens, width = node.input(0)
    heads, kv_heads = node.number("num_heads"), node.number("kv_num_heads")
    size = width // (heads if node.has(1) else heads + 2 * kv_heads)
    past = node.input(3)[2] if node.has(3) else 0
    return 4 * batch * tokens * (tokens + past) * heads * size


COUNTERS: Mapping[str, Callable[[_Sized], int]] = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvInteger": _conv,
    "QLinearConv": partial(_conv, weight=3),
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Attention": _attention,
    "MultiHeadAttention": _multi_head_attention,
    "GroupQueryAttention": _group_query_attention,
}
UNKNOWN = frozenset({
    "LSTM", "GRU", "RNN", "LinearAttention", "DeformConv", "MatMulNBits", "QAttention",
    "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QMoE", "MoE",
})  # fmt: skip
