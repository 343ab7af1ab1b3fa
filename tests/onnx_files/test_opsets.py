"""Conversion to opset 23: the same numbers from ONNX Runtime before and after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from attn_export.errors import ExportError
from attn_export.onnx_files.onnx_file import read
from attn_export.runtimes import ort_cpu
from tests.file_graphs import floats, save

NODE = helper.make_node
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 24


def both(path: Path) -> tuple[np.ndarray, np.ndarray, ir.Model]:
    """y of the file as it is and of the converted graph, without optimisations."""
    model = read(path).model
    after = ir.to_proto(model).SerializeToString()
    answers = []
    for source in (path, after):
        with ort_cpu.load(source, 1, optimize=False) as session:
            answers.append(session.run({"x": X})["y"])
    return answers[0], answers[1], model


@pytest.mark.parametrize(
    ("opset", "nodes", "rank"),
    [
        (12, [NODE("Softmax", ["x"], ["y"])], 3),
        (11, [NODE("Softmax", ["x"], ["y"], axis=0)], 3),
        (12, [NODE("Softmax", ["x"], ["y"], axis=2)], 3),
        (12, [NODE("LogSoftmax", ["x"], ["y"], axis=-2)], 3),
        (11, [NODE("Unsqueeze", ["x"], ["a"], axes=[0, 2]), NODE("Neg", ["a"], ["y"])], 5),
        (12, [NODE("Unsqueeze", ["x"], ["a"], axes=[0]), NODE("Squeeze", ["a"], ["y"])], 3),
        (11, [NODE("ReduceSum", ["x"], ["y"], axes=[1], keepdims=0)], 2),
        (17, [NODE("ReduceMean", ["x"], ["y"], axes=[-1])], 3),
        (13, [NODE("ReduceMax", ["x"], ["y"], keepdims=0)], 0),
        (11, [NODE("Split", ["x"], ["a", "y"], axis=2, split=[1, 3])], 3),
        (12, [NODE("Split", ["x"], ["a", "y"], axis=2)], 3),
        (17, [NODE("Split", ["x"], ["a", "y"], axis=2)], 3),
        (11, [NODE("Dropout", ["x"], ["y"], ratio=0.9)], 3),
        (11, [NODE("Softmax", ["x"], ["a"], axis=1), NODE("Softmax", ["a"], ["y"], axis=1)], 3),
    ],
)
def test_an_operator_that_changed_computes_the_same(
    tmp_path: Path, opset: int, nodes: list[onnx.NodeProto], rank: int
) -> None:
    output = floats("y", *[None] * rank)
    path = save(tmp_path / "m.onnx", nodes, [floats("x", 2, "b", 4)], [output], {}, opset)
    before, after, model = both(path)
    assert model.opset_imports[""] == 23
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)


def test_softmax_before_opset_13_normalises_all_axes_from_its_own_on(tmp_path: Path) -> None:
    nodes = [NODE("Mul", ["x", "nothing"], ["a"]), NODE("Softmax", ["a"], ["y"], axis=1)]
    path = save(
        tmp_path / "m.onnx", nodes, [floats("x", 2, 3, 4)], [floats("y", 2, 3, 4)],
        {"nothing": np.zeros(1, np.float32)}, 12,
    )  # fmt: skip
    before, after, _ = both(path)
    np.testing.assert_allclose(before, 1 / 12, rtol=1e-6)
    np.testing.assert_allclose(after, 1 / 12, rtol=1e-6)


def test_branches_are_converted_too(tmp_path: Path) -> None:
    then = helper.make_graph(
        [NODE("Unsqueeze", ["x"], ["t"], axes=[0])], "then", [], [floats("t", 1, 2, 3, 4)]
    )
    other = helper.make_graph(
        [NODE("Neg", ["x"], ["n"]), NODE("Unsqueeze", ["n"], ["e"], axes=[0])], "else", [],
        [floats("e", 1, 2, 3, 4)],
    )  # fmt: skip
    nodes = [NODE("If", ["flag"], ["y"], then_branch=then, else_branch=other)]
    path = save(
        tmp_path / "m.onnx", nodes, [floats("x", 2, 3, 4)], [floats("y", 1, 2, 3, 4)],
        {"flag": np.array(False)}, 11,
    )  # fmt: skip
    before, after, _ = both(path)
    np.testing.assert_array_equal(before, -X[None])
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(("opset", "kept"), [(23, 23), (24, 24), (25, 25), (26, 26)])
def test_newer_opsets_stay(tmp_path: Path, opset: int, kept: int) -> None:
    path = save(tmp_path / "m.onnx", [NODE("Neg", ["x"], ["y"])], [floats("x", 2)],
                [floats("y", 2)], {}, opset)  # fmt: skip
    assert read(path).model.opset_imports[""] == kept


def test_an_operator_that_only_onnx_runtime_has_in_onnxs_domain_stays(tmp_path: Path) -> None:
    """As its optimiser writes them: LayerNormalization came to ONNX with opset 17."""
    nodes = [NODE("LayerNormalization", ["x", "scale"], ["y"])]
    numbers = {"scale": np.ones(4, np.float32)}
    path = save(
        tmp_path / "m.onnx", nodes, [floats("x", 2, 3, 4)], [floats("y", 2, 3, 4)], numbers, 12
    )
    before, after, _ = both(path)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)


def test_normalisation_in_training_mode_is_refused(tmp_path: Path) -> None:
    nodes = [NODE("BatchNormalization", ["x", *"abcd"], ["y", "mean"], name="norm")]
    numbers = {name: np.ones(1, np.float32) for name in "abcd"}
    x, outputs = floats("x", 1, 1, 2, 2), [floats("y", 1, 1, 2, 2), floats("mean", 1)]
    path = save(tmp_path / "m.onnx", nodes, [x], outputs, numbers, 13)
    with pytest.raises(ExportError, match="'norm' is in training mode; export it in eval mode"):
        read(path)


def test_an_attribute_that_is_gone_is_named(tmp_path: Path) -> None:
    nodes = [NODE("Relu", ["x"], ["y"], name="old", consumed_inputs=[0])]
    path = save(tmp_path / "m.onnx", nodes, [floats("x", 2)], [floats("y", 2)], {}, 11)
    with pytest.raises(ExportError, match="Relu 'old' with 'consumed_inputs' has no counterpart"):
        read(path)
