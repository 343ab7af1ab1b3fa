"""ONNX models as protobufs: every tensor that they store, and the same computation in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    for tensor in graph_tensors(model):
        if tensor.data_type in FLOATS:
            array = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    _graph_in_double(model.graph)
    for function in model.functions:
        _nodes_in_double(function.node)


def _graph_in_double(graph: onnx.GraphProto) -> None:
    for value in [*graph.input, *graph.output]:
        if value.type.tensor_type.elem_type in FLOATS:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    graph.ClearField("value_info")
    _nodes_in_double(graph.node)


def _nodes_in_double(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i in FLOATS:
                attribute.i = TensorProto.DOUBLE
            elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                single = attribute.name == "value_float"
                array = np.asarray(attribute.f if single else attribute.floats, np.float64)
                tensor = numpy_helper.from_array(array)
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
            for graph in (attribute.g, *attribute.graphs):
                _graph_in_double(graph)
