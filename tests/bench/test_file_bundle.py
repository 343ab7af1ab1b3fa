"""`bench MODEL.onnx`: the file against itself with optimisations off, and against its source."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from attn_export.bench.file_bundle import file_bundle
from attn_export.errors import FileError
from tests.boundary import Cli


@pytest.fixture
def file(digits_bundle: Path, tmp_path: Path) -> Path:
    """The graph of a bundle, with its weights beside it."""
    for name in ("model.cpu.onnx", "weights.data"):
        shutil.copy(digits_bundle / name, tmp_path / name)
    return tmp_path / "model.cpu.onnx"


def test_a_file_is_timed_against_nothing(cli: Cli, file: Path) -> None:
    before = sorted(path.name for path in file.parent.iterdir())
    ended = cli("bench", file, "--seconds", "0.2", "--batch", "2", "--json")
    assert ended.code == 0, ended.stderr
    assert (ended.json["model"], ended.json["baseline"]) == ("model.cpu.onnx", None)
    row = ended.json["runtimes"]["ort-cpu"]
    assert row["parity"] == {"passed": True, "failures": []}
    assert row["product_gflop"] == pytest.approx(2 * 0.009100032)
    assert sorted(path.name for path in file.parent.iterdir()) == before


def test_its_source_is_the_baseline_where_it_is_given(cli: Cli, file: Path) -> None:
    ended = cli("bench", file, "--source", "vit-digits", "--seconds", "0.2", "--json")
    assert ended.code == 0, ended.stderr
    assert ended.json["baseline"] == "torch"
    assert {n: r["parity"]["passed"] for n, r in ended.json["runtimes"].items()} == {
        "torch": True, "ort-cpu": True
    }  # fmt: skip


def test_the_file_is_measured_as_it_is(file: Path) -> None:
    with file_bundle(file, None, lambda _: None) as bundle:
        given = onnx.load(file, load_external_data=False).graph
        timed = onnx.load(bundle.path / "model.onnx", load_external_data=False).graph
        assert [node.op_type for node in timed.node] == [node.op_type for node in given.node]
        assert {case.inputs["image"].shape[0] for case in bundle.cases()} == {1, 3}


def test_a_file_that_cannot_be_run_is_not_timed(tmp_path: Path) -> None:
    """An operator of nobody: its answers cannot be checked, so there is no speed."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", 4]) for n in "xy"]
    node = helper.make_node("Nothing", ["x"], ["y"], domain="nobody")
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("nobody", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    with (
        pytest.raises(FileError, match=r"cannot be checked .*no operators of nobody"),
        file_bundle(tmp_path / "m.onnx", None, lambda _: None),
    ):
        pass
