"""What ONNX Runtime does itself when it loads a graph, so that no pass here has to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

from attn_export.runtimes.ort import import_onnxruntime


def optimised(text: str, tmp_path: Path, **weights: np.ndarray) -> list[str]:
    """The operators that are left of a graph whose other inputs are these constants."""
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]


def test_a_factor_on_queries_goes_into_the_product(tmp_path: Path) -> None:
    """So that folding the scale into the weights would save no node."""
    text = """<ir_version: 10, opset_import: ["": 18]>
        g (float[b, 4, 17, 16] q, float[b, 4, 16, 17] k) => (float[b, 4, 17, 17] p) {
            scaled = Mul(q, factor)
            z = MatMul(scaled, k)
            p = Softmax(z)
        }"""
    left = optimised(text, tmp_path, factor=np.array(0.25, np.float32))
    assert left == ["FusedMatMul", "Softmax"]


def test_an_interpolated_position_table_is_folded(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 18]>
        g (float[b, 784, 8] x) => (float[b, 784, 8] y) {
            larger = Resize<mode = "cubic">(table, , factors)
            rows = Reshape(larger, shape)
            positions = Transpose<perm = [0, 2, 1]>(rows)
            y = Add(x, positions)
        }"""
    left = optimised(
        text, tmp_path, table=np.ones((1, 8, 14, 14), np.float32),
        factors=np.array([1, 1, 2, 2], np.float32), shape=np.array([1, 8, -1]),
    )  # fmt: skip
    assert left == ["Add"]
