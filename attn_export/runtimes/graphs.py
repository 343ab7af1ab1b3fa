"""What a runtime must know of a graph before it is given to it; weights are not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx.external_data_helper import load_external_data_for_model

from attn_export.errors import FileError, UsageError, one_line
from attn_export.protos import graph_tensors
from attn_export.runtimes.base import Graph, GraphBytes, TensorSpec

STANDARD = ("", "ai.onnx")


def read(model: Graph) -> onnx.ModelProto:
    """The graph without its external weights.

    Raises:
        FileError: it does not parse.
    """
    try:
        if isinstance(model, Path):
            found = onnx.load(model, load_external_data=False)
        else:
            found = onnx.load_from_string(model if isinstance(model, bytes) else model.data)
        if not found.ir_version:  # an empty file parses
            raise ValueError("it has no ir_version")
        return found
    except Exception as error:  # protobuf's DecodeError is not part of its public interface
        name = "the model" if isinstance(model, bytes) else model.name
        raise FileError(f"{name} does not parse ({one_line(error)})", "export it again") from error


def whole(model: Graph) -> onnx.ModelProto:
    """The graph with its weights.

    Raises:
        FileError: it does not parse.
    """
    found = read(model)
    if folder := weight_folder(model):
        load_external_data_for_model(found, str(folder))
    return found


def weight_folder(model: Graph) -> Path | None:
    """Where its external weights lie."""
    if isinstance(model, Path):
        return model.parent
    return model.folder if isinstance(model, GraphBytes) else None


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of subgraphs included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes(inner)


def refuse_foreign(model: onnx.ModelProto, runtime: str) -> None:
    """Raise UsageError where a graph has operators that are not ONNX's own."""
    found = [n for n in nodes(model.graph) if n.domain not in STANDARD]
    own = {(function.domain, function.name) for function in model.functions}
    foreign = [node for node in found if (node.domain, node.op_type) not in own]
    if foreign:
        first = foreign[0]
        raise UsageError(
            f"{runtime} has no {first.domain} ops, and the graph has {len(foreign)} of them, first"
            f" {first.op_type} '{first.name}'",
            "export with --lowering standard or decomposed, or for another --target",
        )


def weight_files(model: onnx.ModelProto) -> list[str]:
    """Names of the files that hold its external weights, sorted."""
    entries = [entry for tensor in graph_tensors(model) for entry in tensor.external_data]
    return sorted({entry.value for entry in entries if entry.key == "location"})


def inputs(model: onnx.ModelProto) -> list[TensorSpec]:
    """Its inputs; a size without a number or name gets the name `?INPUT.AXIS`."""
    known = {tensor.name for tensor in model.graph.initializer}
    return [_spec(value) for value in model.graph.input if value.name not in known]


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(
        size.dim_value if size.HasField("dim_value") else size.dim_param or f"?{value.name}.{axis}"
        for axis, size in enumerate(tensor.shape.dim)
    )
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return TensorSpec(value.name, dtype.name, shape)
