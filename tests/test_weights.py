"""Weights beside a graph: read back as they were, whatever their dtype and wherever they lay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.weights import write_graphs

VALUES = np.arange(2048) % 15 - 7


def model(tensor: onnx.TensorProto) -> ir.Model:
    output = helper.make_tensor_value_info("y", tensor.data_type, None)
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [output],
                              [tensor])  # fmt: skip
    return ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    )


@pytest.mark.parametrize("dtype", ["INT4", "UINT8", "BFLOAT16", "FLOAT16", "DOUBLE"])
def test_any_dtype_comes_back_as_it_was(tmp_path: Path, dtype: str) -> None:
    number = TensorProto.DataType.Value(dtype)
    values = VALUES % 8 if dtype == "UINT8" else VALUES
    given = helper.make_tensor("w", number, [2048], values)
    write_graphs(tmp_path, {"m.onnx": model(given)}, "m.data")
    (stored,) = onnx.load(tmp_path / "m.onnx").graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(stored).astype(np.float64), values)
    assert (tmp_path / "m.data").exists()


def test_strings_stay_inside(tmp_path: Path) -> None:
    words = [f"word {index}" for index in range(500)]
    given = helper.make_tensor("w", TensorProto.STRING, [500], [word.encode() for word in words])
    write_graphs(tmp_path, {"m.onnx": model(given)}, "m.data")
    (stored,) = onnx.load(tmp_path / "m.onnx").graph.initializer
    assert [text.decode() for text in stored.string_data] == words
    assert not (tmp_path / "m.data").exists()


def test_small_weights_of_another_file_come_along(tmp_path: Path) -> None:
    (tmp_path / "old.data").write_bytes(np.float32([1, 2]).tobytes())
    given = ir.ExternalTensor(
        "old.data", 0, 8, ir.DataType.FLOAT, shape=ir.Shape([2]), name="w", base_dir=tmp_path
    )
    whole = model(numpy_helper.from_array(np.float32([0, 0]), "w"))
    whole.graph.initializers["w"].const_value = given
    (tmp_path / "new").mkdir()
    write_graphs(tmp_path / "new", {"m.onnx": whole}, "m.data")
    (stored,) = onnx.load(tmp_path / "new" / "m.onnx").graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(stored), [1, 2])
