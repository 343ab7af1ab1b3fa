"""Run a float16 or bfloat16 graph where nothing computes in it.

ONNX Runtime's CPU provider has few float16 kernels and no bfloat16 ones. What it lacks in float16
it computes in float32 without rounding between one node and the next, so that an overflow, or a
difference that cancels, would not be seen.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from attn_export.precision.ops import FLOAT, MOVES
from attn_export.runtimes.base import Graph, GraphBytes

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
STAND_IN = "ort-cpu, rounding to half"


def stand_in(model: ir.Model) -> ir.Model:
    """A copy that computes in float32 and rounds what was half after each node.

    So does a kernel that sums up in float32 and stores its result. What a device does otherwise is
    not seen by it. Inputs and outputs are float32.
    """
    copy = model.clone()
    graph = copy.graph
    for value in graph.initializers.values():
        if value.dtype in HALVES and value.const_value is not None:
            array = value.const_value.numpy().astype(np.float32)
            value.const_value = ir.Tensor(array, name=str(value.name))
            value.type = ir.TensorType(FLOAT)
    for value in graph.inputs:
        if (half := value.dtype) in HALVES and half is not None:
            value.type = ir.TensorType(FLOAT)
            _round(graph, value, half)
    for node in list(graph):
        if node.op_type == "Cast" and ir.DataType(node.attributes.get_int("to", 1)) in HALVES:
            node.attributes.add(ir.AttrInt64("to", FLOAT.value))
        for value in node.outputs:
            if (half := value.dtype) not in HALVES or half is None:
                continue
            value.type = ir.TensorType(FLOAT)  # a clone shares the type itself
            if node.op_type not in MOVES:
                _round(graph, value, half)
    graph.sort()
    return copy


def _round(graph: ir.Graph, value: ir.Value, half: ir.DataType) -> None:
    """Let all readers see the rounded number; it takes the name, unless an input has that."""
    uses = list(value.uses())
    name = str(value.name)
    short = _cast(graph, value, half, f"{name}_short")
    rounded = _cast(graph, short, FLOAT, f"{name}_rounded")
    for node, index in uses:
        node.replace_input_with(index, rounded)
    if value.is_graph_input():
        return
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = rounded
    value.name, rounded.name = f"{name}_exact", name


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
    output = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
    graph.append(ir.node("Cast", [value], {"to": dtype.value}, outputs=[output], name=name))
    return output


def stand_in_bytes(graph: Graph) -> bytes:
    """The stand-in of a stored graph, weights inside."""
    if isinstance(graph, GraphBytes):
        model = ir.from_proto(onnx.load_model_from_string(graph.data))
        ir.external_data.set_base_dir(model.graph, graph.folder)
    elif isinstance(graph, bytes):
        model = ir.from_proto(onnx.load_model_from_string(graph))
    else:
        model = ir.load(graph)
    copy = stand_in(model)
    for part in copy.graphs():
        for value in part.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                array = value.const_value.numpy().copy()
                value.const_value = ir.Tensor(array, dtype=value.dtype, name=str(value.name))
    return bytes(ir.to_proto(copy).SerializeToString())
