"""ONNX models as protobufs: every tensor that they store, and the same in other floats."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import load_external_data_for_model

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def graph_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every stored tensor: of the graph, its subgraphs, its functions and their attributes."""
    yield from _constants(model.graph)
    yield from _node_tensors([*model.graph.node, *(n for f in model.functions for n in f.node)])


def _constants(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _sparse(graph.sparse_initializer)


def _sparse(tensors: Iterable[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for tensor in tensors:
        yield from (tensor.values, tensor.indices)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """The tensors in attributes, and all of those in subgraphs (If, Loop and Scan bodies)."""
    for node in nodes:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            yield from _sparse((attribute.sparse_tensor, *attribute.sparse_tensors))
            for graph in (attribute.g, *attribute.graphs):
                yield from _constants(graph)
                yield from _node_tensors(graph.node)


def with_weights(data: bytes, folder: Path) -> bytes:
    """A serialized model with the weights inside that it keeps in files of `folder`.

    Raises:
        ValueError: it takes more than the 2 GB that a protobuf may hold.
    """
    model = onnx.load_model_from_string(data)
    load_external_data_for_model(model, str(folder))
    return bytes(model.SerializeToString())


def in_double(model: onnx.ModelProto) -> None:
    """Make every float of a model, its subgraphs and functions a double, in place."""
    _in_floats(model, FLOATS, TensorProto.DOUBLE)


def in_single(model: onnx.ModelProto) -> None:
    """Make every bfloat16 of a model, its subgraphs and functions a float32, in place."""
    _in_floats(model, (TensorProto.BFLOAT16,), TensorProto.FLOAT)


def _in_floats(model: onnx.ModelProto, old: Collection[int], new: int) -> None:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(new)
    for tensor in graph_tensors(model):
        if tensor.data_type in old:
            array = numpy_helper.to_array(tensor).astype(dtype)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    _graph_in_floats(model.graph, old, new)
    for function in model.functions:
        _nodes_in_floats(function.node, old, new)


def _graph_in_floats(graph: onnx.GraphProto, old: Collection[int], new: int) -> None:
    for value in [*graph.input, *graph.output]:
        if value.type.tensor_type.elem_type in old:
            value.type.tensor_type.elem_type = new
    graph.ClearField("value_info")
    _nodes_in_floats(graph.node, old, new)


def _nodes_in_floats(nodes: Iterable[onnx.NodeProto], old: Collection[int], new: int) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i in old:
                attribute.i = new
            elif (
                node.op_type == "Constant"
                and attribute.name in ("value_float", "value_floats")
                and TensorProto.FLOAT in old
            ):
                single = attribute.name == "value_float"
                dtype = onnx.helper.tensor_dtype_to_np_dtype(new)
                array = np.asarray(attribute.f if single else attribute.floats, dtype)
                tensor = numpy_helper.from_array(array)
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
            bodies = [attribute.g] if attribute.HasField("g") else []
            for graph in (*bodies, *attribute.graphs):
                _graph_in_floats(graph, old, new)
