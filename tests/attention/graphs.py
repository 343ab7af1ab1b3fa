"""Export a module for the tests of this folder, and run what came out."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from attn_export.exporting.exporter import Graph, to_onnx
from attn_export.models.spec import Axis, ExportSpec
from attn_export.runtimes import ort_cpu

BATCH, TOKENS, CONTEXT = Axis("batch", 1, 8), Axis("tokens", 1, 64), Axis("context", 1, 64)
SIZES = [{"batch": 3, "tokens": 7, "context": 4}, {"batch": 1, "tokens": 2, "context": 5}]


def seeded(module: type[nn.Module], **arguments: object) -> nn.Module:
    torch.manual_seed(0)
    return module(**arguments).eval()


def exported(module: nn.Module, **inputs: Tensor) -> Graph:
    """Batch and tokens of `x` and `context` dynamic."""
    dynamic = {"x": {0: BATCH, 1: TOKENS}, "context": {0: BATCH, 1: CONTEXT}}
    kept = {name: dynamic[name] for name in inputs if name in dynamic}
    return to_onnx(ExportSpec(module, inputs, kept, ("y",)))


def run(model: ir.Model, **inputs: Tensor) -> np.ndarray:
    proto = ir.to_proto(model)
    with ort_cpu.load(proto.SerializeToString(), threads=1) as session:
        return session.run({name: value.numpy() for name, value in inputs.items()})["y"]


def op_types(model: ir.Model) -> list[str]:
    return [f"{node.domain or 'ai.onnx'}.{node.op_type}" for node in model.graph]
