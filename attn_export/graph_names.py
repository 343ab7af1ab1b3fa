"""Names in an exported graph: inputs, outputs, dynamic sizes, and where each node came from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from attn_export.attention.metadata import MODULE, ORIGIN
from attn_export.errors import ExportError

if TYPE_CHECKING:  # existing files are read where torch is not installed
    from attn_export.models.spec import ExportSpec

EXPORTER_PREFIX = "pkg."


def name_values(model: ir.Model, spec: ExportSpec) -> None:
    """Give inputs and outputs the names of the spec.

    Raises:
        ExportError: the graph has another number of them than the model.
    """
    graph = model.graph
    if len(graph.inputs) != len(spec.inputs) or len(graph.outputs) != len(spec.outputs):
        raise ExportError(
            f"the graph has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs, the model"
            f" {len(spec.inputs)} and {len(spec.outputs)}",
            "let forward take and return plain tensors",
        )
    inputs = [spec.names.get(name, name) for name in spec.inputs]
    wanted = {*inputs, *spec.outputs}
    values = [
        *graph.inputs,
        *(v for node in graph for v in node.outputs),
        *graph.initializers.values(),
    ]
    for value in values:
        if value.name in wanted:
            value.name = f"{value.name}_inner"
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = name
    for index, name in enumerate(spec.outputs):
        value = graph.outputs[index]
        if value.is_graph_input() or value.is_initializer() or value in graph.outputs[:index]:
            node = ir.node("Identity", [value])
            node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
            graph.append(node)
            graph.outputs[index] = value = node.outputs[0]
        value.name = name


def name_sizes(model: ir.Model, spec: ExportSpec) -> None:
    """Give the exporter's symbols (s77) the declared axes' names, and check that none froze."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        for axis, declared in spec.axes().get(value.name or "", {}).items():
            size = value.shape[axis] if value.shape is not None else None
            if not isinstance(size, ir.SymbolicDim) or size.value is None:
                raise ExportError(
                    f"axis {axis} of '{value.name}' was asked to be dynamic and froze at {size}",
                    "find the place in forward that turns this size into a Python number",
                )
            names[str(size.value)] = declared.name
    for graph in model.graphs():
        for value in _values(graph):
            if value.shape is None:
                continue
            value.shape = ir.Shape([_rename(size, names) for size in value.shape])


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _rename(size: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | str | None:
    if isinstance(size, int) or size.value is None:
        return size if isinstance(size, int) else None
    return re.sub(r"[A-Za-z_]\w*", lambda word: names.get(word[0], word[0]), str(size.value))


def clean_metadata(model: ir.Model) -> None:
    """Keep a node's module and source line; drop the exporter's notes, which hold local paths."""
    model.metadata_props.clear()
    for graph in model.graphs():
        graph.metadata_props.clear()
        for value in [*_values(graph), *graph.initializers.values()]:
            value.metadata_props.clear()
        for node in graph:
            module, origin = origin_of(node.metadata_props)
            for key in [key for key in node.metadata_props if key.startswith(EXPORTER_PREFIX)]:
                del node.metadata_props[key]
            node.metadata_props.pop("namespace", None)
            if module:
                node.metadata_props[MODULE] = module
            if origin:
                node.metadata_props[ORIGIN] = origin


def origin_of(metadata: Mapping[str, str]) -> tuple[str, str]:
    """Module path ("blocks.0.attn") and "vit.py:52" of a node, each empty where it is unknown."""
    scopes = ast.literal_eval(metadata.get("pkg.torch.onnx.name_scopes", "[]"))
    module = next((scope for scope in reversed(scopes[:-1]) if scope), "")
    frames = re.findall(
        r'File "([^"]+)", line (\d+)', metadata.get("pkg.torch.onnx.stack_trace", "")
    )
    origin = f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""
    return module, origin
