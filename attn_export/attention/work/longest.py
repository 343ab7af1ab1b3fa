"""A padded batch computed at its longest row's length, whatever it was padded to.

Everything between the inputs and the outputs of a graph whose length is symbolic holds at any
length: inputs are cut in front of it, and outputs get zeros behind it.
"""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.sizes import Size, size_of, sizes
from attn_export.attention.work.token_wise import Padded

INT64 = ir.DataType.INT64
SUFFIX = "_longest"


def trim(model: ir.Model, padded: Padded) -> None:
    """Rewrite the main graph in place, where `why_not_trimmed` has nothing against it."""
    length = padded.sizes[1]
    symbol = str(length)
    before = [value for node in model.graph.all_nodes() for value in node.outputs]
    cut = {id(v): v for v in model.graph.inputs if length in sizes(v)}
    outputs = [v for v in model.graph.outputs if length in sizes(v)]
    wanted = {id(value): sizes(value) for value in outputs}
    uses = {key: list(value.uses()) for key, value in cut.items()}
    b = Builder(f"{padded.mask.name}/longest", {})
    end = _longest(b, padded)
    for key, value in cut.items():
        short = _cut(b, value, length, end)
        for node, index in uses[key]:
            node.replace_input_with(index, short)
    renamed = re.compile(rf"\b{re.escape(symbol)}\b")
    for value in before:
        if value.shape is not None:
            value.shape = ir.Shape([
                renamed.sub(f"{symbol}{SUFFIX}", str(size.value))
                if isinstance(size, ir.SymbolicDim) and size.value is not None else size
                for size in value.shape
            ])  # fmt: skip
    _insert(model.graph, b, front=True)
    b = Builder(f"{padded.mask.name}/longest/outputs", {})
    for value in outputs:
        _lengthened(b, model.graph, value, wanted[id(value)], length, padded, end)
    _insert(model.graph, b, front=False)


def why_not_trimmed(graph: ir.Graph, padded: Padded) -> str:
    """Why the inputs cannot be cut at the longest row; empty where they can."""
    length = padded.sizes[1]
    if isinstance(length, int):
        return f"the length of '{padded.mask.name}' is fixed at {length}, not dynamic"
    for value in (*graph.inputs, *graph.outputs):
        if value.is_graph_input() and value in graph.outputs:
            return f"'{value.name}' is returned as it is"
        for size in sizes(value):
            if not isinstance(size, int) and size != length and length in size.free_symbols:
                return f"'{value.name}' has a size {size}, not {length} itself"
    return ""


def _insert(graph: ir.Graph, b: Builder, *, front: bool) -> None:
    for weight in b.weights:
        graph.register_initializer(weight)
    if front:
        graph.insert_before(graph[0], b.nodes)
    else:
        graph.extend(b.nodes)


def _longest(b: Builder, padded: Padded) -> ir.Value:
    """int64 (1,): the length of the longest row, right padded as it is."""
    mask, (batch, _) = padded.mask, padded.sizes
    kept = b.op("Cast", [mask], padded.sizes, INT64, to=int(INT64))
    if not padded.keeps:
        kept = b.op("Sub", [b.constant(np.array(1, np.int64)), kept], padded.sizes)
    lengths = b.op("ReduceSum", [kept, _ints(b, 1)], (batch,), INT64, keepdims=0)
    return b.op("ReduceMax", [lengths, _ints(b, 0)], (1,), INT64, keepdims=1)


def _ints(b: Builder, *numbers: int) -> ir.Value:
    return b.constant(np.array(numbers, np.int64))


def _cut(b: Builder, value: ir.Value, length: Size, end: ir.Value) -> ir.Value:
    axes = [axis for axis, size in enumerate(sizes(value)) if size == length]
    ends = b.op("Concat", [end] * len(axes), [len(axes)], axis=0) if axes[1:] else end
    short = [size_of(f"{length}{SUFFIX}") if s == length else s for s in sizes(value)]
    starts = _ints(b, *[0] * len(axes))
    return b.op("Slice", [value, starts, ends, _ints(b, *axes)], short, value.dtype)


def _lengthened(
    b: Builder, graph: ir.Graph, value: ir.Value, wanted: tuple[Size, ...], length: Size,
    padded: Padded, end: ir.Value,
) -> None:  # fmt: skip
    """Zeros behind an output up to the length that the inputs had."""
    axes = [axis for axis, size in enumerate(wanted) if size == length]
    whole = b.op("Shape", [padded.mask], [1], INT64, start=1, end=2)
    missing = b.op("Sub", [whole, end], [1], INT64)
    ends = [_ints(b, *[0] * len(axes)), *[missing] * len(axes)]
    pads = b.op("Concat", ends, [2 * len(axes)], INT64, axis=0)
    long = b.op("Pad", [value, pads, None, _ints(b, *axes)], wanted, value.dtype)
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = long
    long.name, value.name = value.name, f"{value.name}/longest"
