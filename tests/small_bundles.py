"""Bundles of one node, whose answers are known without a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from attn_export import bundle as bundles
from attn_export.parity.tolerance import Group
from attn_export.reference import Case, write_cases

Y = np.array([[512.0, 0.5], [512.0, 0.5]], np.float32)


def small_bundle(
    folder: Path, node: onnx.NodeProto, *, cases: list[Case] | None = None, groups: bool = False
) -> Path:
    """A bundle of x (batch, 2) -> y (batch, 2) with one node, whose PyTorch answered y = x."""
    sizes = ["batch", 2]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, sizes) for n in "xy"]
    two_rows = helper.make_tensor("two_rows", TensorProto.INT64, [2], [2, 2])
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [2], [1.0, 1.01])
    graph = helper.make_graph([node], "g", values[:1], values[1:], [two_rows, scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    parts = [Group("box", 1, 0, 1), Group("score", 1, 1, 2)] if groups else []
    allowed = {"y": dict.fromkeys(("box", "score"), 0.0001) if groups else {"all": 1e-4}}
    default = [Case("case", "model", {"x": Y}, {"y": Y}, {}, allowed)]
    entries = [{"name": n, "component": "model", "dtype": "float32", "shape": sizes} for n in "xy"]
    counts = dict.fromkeys(("total", "recognised", "lowered", "refused"), 0)
    target = {
        "name": "cpu", "runtime": "ort-cpu", "component": "model", "file": "model.cpu.onnx",
        "precision": "fp32", "sites": [], "other": [], "tolerance": {"factor": 8, "floor": 64},
        **counts,
    }  # fmt: skip
    manifest = {
        "name": "small", "source": "nowhere:build", "components": ["model"], "targets": [target],
        "created": "2026-11-29T12:00:00+00:00", "versions": {},
        "inputs": entries[:1], "outputs": [{**entries[1], "groups": [vars(g) for g in parts]}],
    }  # fmt: skip
    stored = default if cases is None else cases
    with bundles.write(folder) as stage:
        (stage / "model.cpu.onnx").write_bytes(model.SerializeToString())
        write_cases(
            stage / bundles.REFERENCE, stored, {case.component: {"y": parts} for case in stored}
        )
        bundles.seal(stage, manifest)
    return folder


IDENTITY = helper.make_node("Identity", ["x"], ["y"])
OFF_BY_ONE_PERCENT = helper.make_node("Mul", ["x", "scale"], ["y"])  # the second column only
FROZEN = helper.make_node("Reshape", ["x", "two_rows"], ["y"])  # runs at batch 2 alone
