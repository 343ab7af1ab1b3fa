"""Existing files as graphs: names of sizes, what is left alone, and the file as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from attn_export.errors import FileError
from attn_export.onnx_files.onnx_file import read
from tests.file_graphs import D, attention, attention_nodes, beside, constants, floats, save, wide

NODE = helper.make_node


def shape_of(model: ir.Model, name: str) -> list[str]:
    values = [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]
    (value,) = [v for v in values if v.name == name]
    assert value.shape is not None
    return [str(size if isinstance(size, int) else size.value) for size in value.shape]


@pytest.mark.parametrize("opset", [11, 13, 17])
def test_sizes_are_followed_through_the_arithmetic_of_shapes(tmp_path: Path, opset: int) -> None:
    model = read(attention(tmp_path / "m.onnx", opset)).model
    assert shape_of(model, "q") == ["batch", "2", "tokens", "4"]
    assert shape_of(model, "weights") == ["batch", "2", "tokens", "tokens"]
    assert shape_of(model, "y") == ["batch", "tokens", "8"]


def test_bounds_that_are_computed_from_constants_are_followed(tmp_path: Path) -> None:
    """As nn.MultiheadAttention's unflatten writes them."""
    nodes = [
        NODE("Shape", ["x"], ["shape"]),
        NODE("Mod", ["two", "three"], ["end"]),
        NODE("Slice", ["shape", "zero", "end"], ["front"]),
        NODE("Concat", ["front", "two_fours"], ["split"], axis=0),
        NODE("Reshape", ["x", "split"], ["a"]),
        NODE("Softmax", ["a"], ["y"]),
    ]
    numbers = {"two": [2], "three": [3], "zero": [0], "two_fours": [2, 4]}
    path = save(
        tmp_path / "m.onnx", nodes, [floats("x", "batch", "tokens", 8)],
        [floats("y", None, None, 2, 4)], {name: np.array(value) for name, value in numbers.items()},
    )  # fmt: skip
    assert shape_of(read(path).model, "a") == ["batch", "tokens", "2", "4"]


@pytest.mark.parametrize("name", ["batch-size", "p2o.Dim.0", "N", "S", "lambda", "?", None])
def test_any_name_of_a_size_becomes_an_identifier_and_comes_back(
    tmp_path: Path, name: str | None
) -> None:
    nodes = [NODE("Neg", ["x"], ["a"]), NODE("Softmax", ["a"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, [floats("x", name, 4)], [floats("y", name, 4)])
    file = read(path)
    size, _ = shape_of(file.model, "y")
    assert size.isidentifier()
    file.symbols.restore(file.model)
    written = ir.to_proto(file.model).graph
    for value in (written.input[0], written.value_info[0], written.output[0]):
        assert value.type.tensor_type.shape.dim[0].dim_param in (name or "", "")
    if name not in (None, "?"):
        assert written.value_info[0].type.tensor_type.shape.dim[0].dim_param == name


def test_a_sum_of_sizes_stays_a_sum(tmp_path: Path) -> None:
    nodes = [NODE("Concat", ["past", "x"], ["y"], axis=1)]
    inputs = [floats("x", "batch", "tokens"), floats("past", "batch", "kept"),
              floats("mask", "batch", "kept + tokens")]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, inputs, [floats("y", "batch", "kept + tokens")])
    assert shape_of(read(path).model, "mask") == ["batch", "kept + tokens"]


def test_a_size_that_is_not_known_is_no_crash(tmp_path: Path) -> None:
    nodes = [NODE("Twist", ["x"], ["a"], domain="my.ops"), NODE("Softmax", ["a"], ["y"])]
    path = save(
        tmp_path / "m.onnx", nodes, [floats("x", 2)], [floats("y", None)], {}, domains=["my.ops"]
    )
    file = read(path)
    assert file.foreign == ("my.ops",)
    assert "nodes of my.ops are left as they are (1 Twist)" in file.notes


def test_nothing_is_written_while_sizes_are_inferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [NODE("Twist", ["x"], ["a"], domain="my.ops"), NODE("Softmax", ["a"], ["y"])]
    path = save(
        tmp_path / "m.onnx", nodes, [floats("x", 2)], [floats("y", None)], {}, domains=["my.ops"]
    )
    monkeypatch.chdir(tmp_path)
    read(path)
    assert [found.name for found in tmp_path.iterdir()] == ["m.onnx"]


def test_every_node_has_a_name_of_its_own_and_pytorchs_are_modules(tmp_path: Path) -> None:
    nodes = [
        NODE("Relu", ["x"], ["a"]),
        NODE("Relu", ["a"], ["b"], name="twice"),
        NODE("Relu", ["b"], ["c"], name="twice"),
        NODE("Neg", ["c"], ["y"], name="/blocks.0/attn/Neg"),
    ]
    path = save(tmp_path / "m.onnx", nodes, [floats("x", 2)], [floats("y", 2)])
    found = list(read(path).model.graph)
    assert [node.name for node in found] == ["Relu_0", "twice", "twice.1", "/blocks.0/attn/Neg"]
    assert found[3].metadata_props["attn_export.module"] == "blocks.0.attn"


def test_functions_are_inlined(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 17)]
    body = [NODE("Neg", ["a"], ["n"]), NODE("Relu", ["n"], ["b"])]
    function = helper.make_function("local", "NegRelu", ["a"], ["b"], body, opsets)
    path = save(
        tmp_path / "m.onnx", [NODE("NegRelu", ["x"], ["y"], domain="local")], [floats("x", 2)],
        [floats("y", 2)], domains=["local"], functions=[function],
    )  # fmt: skip
    file = read(path)
    assert [node.op_type for node in file.model.graph] == ["Neg", "Relu"]
    assert (file.foreign, file.notes[0]) == ((), "1 model-local functions were inlined")


def test_weights_that_are_inputs_too_become_constants_and_it_is_said(tmp_path: Path) -> None:
    inputs = [floats("x", "batch", "tokens", D), floats("wq", D, D)]
    outputs = [floats("y", "batch", "tokens", D)]
    path = save(tmp_path / "m.onnx", attention_nodes(17), inputs, outputs, constants())
    file = read(path)
    assert [value.name for value in file.model.graph.inputs] == ["x"]
    assert "1 weights were inputs as well; they are constants now" in file.notes


def test_quantised_nodes_are_told(tmp_path: Path) -> None:
    nodes = [
        NODE("QuantizeLinear", ["x", "s", "z"], ["a"]),
        NODE("DequantizeLinear", ["a", "s", "z"], ["y"]),
    ]
    numbers = {"s": np.array(0.1, np.float32), "z": np.array(0, np.int8)}
    path = save(tmp_path / "m.onnx", nodes, [floats("x", 2)], [floats("y", 2)], numbers)
    assert read(path).notes[0] == (
        "quantised nodes are left as they are (1 DequantizeLinear, 1 QuantizeLinear)"
    )


def test_weights_beside_the_file_stay_there(tmp_path: Path) -> None:
    file = read(beside(wide(tmp_path / "m.onnx")))
    tensor = file.model.graph.initializers["broad"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert file.weight_files == {tmp_path / "m.onnx.data"}


def test_small_constants_beside_the_file_are_read(tmp_path: Path) -> None:
    """Axes and sizes, which ONNX's inference wants to see."""
    model = read(beside(wide(tmp_path / "m.onnx"), threshold=0)).model
    assert shape_of(model, "q") == ["batch", "2", "tokens", "4"]


def test_the_file_is_only_read(tmp_path: Path) -> None:
    path = beside(attention(tmp_path / "m.onnx", 11, mask=True))
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()}
    read(path)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()} == before
    onnx.checker.check_model(path)


def test_weights_behind_a_hard_link_are_refused_before_any_work(tmp_path: Path) -> None:
    """As package managers and backups make them; a runtime alone would read them."""
    path = beside(attention(tmp_path / "m.onnx"))
    (tmp_path / "again.data").hardlink_to(tmp_path / "m.onnx.data")
    with pytest.raises(FileError, match=r"m\.onnx\.data is one of 2 hard links.* with `cp`"):
        read(path)
