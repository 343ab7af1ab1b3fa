"""Files that are no sound ONNX model: each is one sentence, and nothing outside is ever read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import helper

from attn_export.errors import FileError
from attn_export.onnx_files.checks import load
from tests.file_graphs import attention, beside, floats, save


def refused(path: Path) -> str:
    with pytest.raises(FileError) as raised:
        load(path)
    return raised.value.observed


def test_a_sound_file_of_each_opset_loads(tmp_path: Path) -> None:
    for opset in (11, 13, 17, 23):
        assert load(attention(tmp_path / "m.onnx", opset)).opset_import[0].version == opset


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda p: None, "there is no file"),
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.mkdir(), "is a folder without a manifest.json"),
        (lambda p: p.write_bytes(b"not an onnx file"), "is not an ONNX model"),
        (lambda p: p.write_bytes(attention(p).read_bytes()[:700]), "is not an ONNX model"),
        (lambda p: p.write_bytes(onnx.ModelProto(ir_version=8).SerializeToString()), "no graph"),
        (lambda p: attention(p, 10), "has opset 10, this version reads 11 to 26"),
        (lambda p: attention(p, 27), "has opset 27, this version reads 11 to 26"),
    ],
)
def test_what_is_no_model_is_told_as_such(
    tmp_path: Path, make: Callable[[Path], object], seen: str
) -> None:
    path = tmp_path / "m.onnx"
    make(path)
    assert seen in refused(path)


def test_two_gigabytes_in_one_protobuf_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)  # sparse: takes no space
    assert "holds 2,147,483,648 bytes, more than protobuf's 2 GB" in refused(path)


@pytest.mark.parametrize(
    ("location", "seen"),
    [
        ("/etc/passwd", "keeps its weights in '/etc/passwd', outside of its folder"),
        ("../secret.data", "keeps its weights in '../secret.data', outside of its folder"),
        ("a/../../secret.data", "outside of its folder"),
        ("link.data", "keeps its weights in 'link.data', a link out of its folder"),
        ("gone.data", "which is not there"),
    ],
)
def test_weights_lie_beside_the_file_or_are_refused(
    tmp_path: Path, location: str, seen: str
) -> None:
    (tmp_path / "secret.data").write_bytes(bytes(10_000))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link.data").symlink_to(tmp_path / "secret.data")
    path = beside(attention(tmp_path / "in" / "m.onnx"))
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())
    assert seen in refused(path)


def test_weights_that_end_too_early_are_refused(tmp_path: Path) -> None:
    path = beside(attention(tmp_path / "m.onnx"))
    data = tmp_path / "m.onnx.data"
    data.write_bytes(data.read_bytes()[:-200])
    assert "ends after" in refused(path)


NODE = helper.make_node


@pytest.mark.parametrize(
    ("nodes", "seen"),
    [
        ([NODE("Relu", ["x"], ["y"]), NODE("Neg", ["x"], ["y"])], "two values are called 'y'"),
        ([NODE("Relu", ["z"], ["y"], name="r")], "Relu 'r' reads 'z', which nothing computes"),
        ([NODE("Relu", ["x"], ["z"])], "its output 'y' is not computed"),
        ([NODE("Add", ["x", "z"], ["y"]), NODE("Neg", ["y"], ["z"])], "run in a circle"),
    ],
)
def test_graphs_that_break_the_rules_of_names_and_order(
    tmp_path: Path, nodes: list[onnx.NodeProto], seen: str
) -> None:
    assert seen in refused(save(tmp_path / "m.onnx", nodes, [floats("x", 2)], [floats("y", 2)]))


def test_an_undefined_name_in_a_branch_is_seen(tmp_path: Path) -> None:
    branch = helper.make_graph([NODE("Neg", ["nowhere"], ["b"])], "b", [], [floats("b", 2)])
    nodes = [NODE("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)]
    flag = helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, [])
    path = save(tmp_path / "m.onnx", nodes, [floats("x", 2), flag], [floats("y", 2)])
    assert "Neg '' reads 'nowhere'" in refused(path)


def test_nodes_may_come_in_any_order(tmp_path: Path) -> None:
    nodes = [NODE("Neg", ["a"], ["y"]), NODE("Relu", ["x"], ["a"])]
    load(save(tmp_path / "m.onnx", nodes, [floats("x", 2)], [floats("y", 2)]))
