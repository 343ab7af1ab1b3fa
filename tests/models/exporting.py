"""The plain exporter, for tests of the models apart from the product's own pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Tensor

from attn_export.models.spec import ExportSpec


def session(
    spec: ExportSpec, path: Path, inputs: Mapping[str, Tensor] | None = None
) -> ort.InferenceSession:
    """The declared axes dynamic, opset 23, on the CPU; `inputs` where some are left out."""
    given = dict(spec.inputs if inputs is None else inputs)
    axes = {axis.name: axis for row in spec.dynamic.values() for axis in row.values()}
    dims = {name: torch.export.Dim(name, min=a.min, max=a.max) for name, a in axes.items()}
    shapes = {
        name: {i: dims[axis.name] for i, axis in spec.dynamic.get(name, {}).items()}
        for name in given
    }
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's own deprecation warnings
        program = torch.export.export(spec.module, (), kwargs=given, dynamic_shapes=shapes)
        exported = torch.onnx.export(program, dynamo=True, opset_version=23, verbose=False)
    assert exported is not None
    _expand_masks(exported.model.graph)
    exported.save(path)
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def _expand_masks(graph: ir.Graph) -> None:
    """A row for each query: ONNX Runtime refuses (B, 1, 1, T) when it runs."""
    for node in list(graph):
        if node.op_type == "Attention" and len(node.inputs) > 3 and node.inputs[3] is not None:
            queries = ir.node("Shape", [node.inputs[0]], attributes={"start": 2, "end": 3})
            one = ir.node("Constant", [], attributes={"value_ints": [1]})
            parts = [queries.outputs[0], one.outputs[0]]
            shape = ir.node("Concat", parts, attributes={"axis": 0})
            expand = ir.node("Expand", [node.inputs[3], shape.outputs[0]])
            graph.insert_before(node, [queries, one, shape, expand])
            node.replace_input_with(3, expand.outputs[0])
