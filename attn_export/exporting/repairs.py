"""What PyTorch's exporter writes although ONNX's specification, or the kernels, refuse it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def repair(model: ir.Model) -> None:
    """All of them, in place."""
    for graph in model.graphs():
        for node in list(graph):
            if node.op_type == "RotaryEmbedding" and node.domain in ("", "ai.onnx"):
                _give_rotary_caches_the_batch(graph, node)


def _give_rotary_caches_the_batch(graph: ir.Graph, node: ir.Node) -> None:
    """Without position ids the cosines and sines are (B, S, H / 2), not (1, S, H / 2).

    Specification: ONNX operator RotaryEmbedding, opset 23.
    """
    x, with_positions = node.inputs[0], len(node.inputs) > 3 and node.inputs[3] is not None
    if x is None or with_positions:
        return
    for index in (1, 2):
        cache = node.inputs[index]
        if cache is None or _batch(cache) == _batch(x) is not None:
            continue
        ones = ir.node("Constant", [], attributes={"value": ir.tensor(np.ones(2, np.int64))})
        batch = ir.node("Shape", [x], attributes={"start": 0, "end": 1})
        shape = ir.node("Concat", [batch.outputs[0], ones.outputs[0]], attributes={"axis": 0})
        expand = ir.node("Expand", [cache, shape.outputs[0]])
        for made in (ones, batch, shape, expand):
            made.metadata_props.update(node.metadata_props)
        graph.insert_before(node, [ones, batch, shape, expand])
        node.replace_input_with(index, expand.outputs[0])
        _describe(expand.outputs[0], x)


def _batch(value: ir.Value) -> int | str | None:
    if value.shape is None or not len(value.shape):
        return None
    size = value.shape[0]
    return size if isinstance(size, int) else size.value


def _describe(cache: ir.Value, x: ir.Value) -> None:
    """(B, S, unknown) of x's type; x is (B, N, S, H) or (B, S, N * H)."""
    cache.type = x.type
    if x.shape is not None:
        tokens = x.shape[2 if len(x.shape) == 4 else 1]
        cache.shape = ir.Shape([x.shape[0], tokens, None])
