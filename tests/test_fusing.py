"""Fusing existing files: what is written computes what was given, or nothing is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import attn_export
from attn_export import fusing
from attn_export.errors import CheckFailed, ExportError, UsageError
from attn_export.fusing import Fused, fuse
from attn_export.runtimes import ort_cpu
from tests.file_graphs import (
    D,
    attention,
    attention_nodes,
    beside,
    constants,
    expected,
    floats,
    save,
    unfusable,
    wide,
)

NODE = helper.make_node


def op_types(path: Path) -> list[str]:
    model = onnx.load(path, load_external_data=False)
    return [f"{node.domain or 'ai.onnx'}.{node.op_type}" for node in model.graph.node]


def answer(path: Path, **inputs: np.ndarray) -> np.ndarray:
    with ort_cpu.load(path, 1) as session:
        return session.run(inputs)["y"]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


@pytest.mark.parametrize("opset", [11, 12, 13, 17, 23])
def test_a_file_of_any_opset_is_fused_and_computes_the_same(tmp_path: Path, opset: int) -> None:
    source = attention(tmp_path / "m.onnx", opset)
    before = contents(tmp_path)
    fused = fuse(source, tmp_path / "out.onnx", require="all")
    assert (fused.account["total"], fused.account["lowered"]) == (1, 1)
    assert fused.account["sites"][0]["proved"] == "run"
    assert "ai.onnx.Softmax" not in op_types(tmp_path / "out.onnx")
    assert fused.verification is not None
    assert fused.verification.passed
    x = np.random.default_rng(5).standard_normal((2, 9, D)).astype(np.float32)
    np.testing.assert_allclose(answer(tmp_path / "out.onnx", x=x), expected(x), rtol=0, atol=1e-5)
    after = contents(tmp_path)
    assert after.pop("out.onnx")
    assert after == before


def test_names_sizes_and_metadata_are_those_of_the_file(tmp_path: Path) -> None:
    source = attention(tmp_path / "m.onnx")
    model = onnx.load(source)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch.size"
    helper.set_model_props(model, {"character": "abc"})
    source.write_bytes(model.SerializeToString())
    fuse(source, tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    assert {entry.key: entry.value for entry in written.metadata_props} == {"character": "abc"}
    shape = written.graph.input[0].type.tensor_type.shape.dim
    assert [size.dim_param or size.dim_value for size in shape] == ["batch.size", "tokens", D]
    onnx.checker.check_model(tmp_path / "out.onnx")


def test_weights_beside_the_source_go_beside_the_output(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = beside(attention(tmp_path / "in" / "m.onnx"))
    before = contents(tmp_path / "in")
    output = tmp_path / "to" / "out.onnx"
    fuse(source, output)
    assert {p.name for p in output.parent.iterdir()} == {"out.onnx"}  # none of 1 KB or more
    big = beside(wide(tmp_path / "in" / "wide.onnx"))
    fuse(big, output, overwrite=True)
    assert {p.name for p in output.parent.iterdir()} == {"out.onnx", "out.onnx.data"}
    places = {
        entry.value
        for tensor in onnx.load(output, load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert places == {"out.onnx.data"}
    fuse(source, output, overwrite=True)
    assert {p.name for p in output.parent.iterdir()} == {"out.onnx"}
    after = contents(tmp_path / "in")
    assert {name: after[name] for name in before} == before


def test_sites_are_proved_with_weights_that_stay_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "attn_export.onnx_files.shapes.SMALL", 100
    )  # so that weights of 256 bytes stay there
    fused = fuse(beside(attention(tmp_path / "m.onnx")), tmp_path / "out.onnx")
    assert fused.account["sites"][0]["lowering"] == "com.microsoft.Attention"


def test_large_weights_go_beside_the_output_whatever_the_source_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "INLINE_LIMIT", 1000)
    fuse(wide(tmp_path / "m.onnx"), tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").stat().st_size >= D * 128 * 4


def test_a_mask_with_holes_is_part_of_the_comparison(tmp_path: Path) -> None:
    fused = fuse(attention(tmp_path / "m.onnx", mask=True), tmp_path / "out.onnx")
    assert fused.account["total"] == 1
    x = np.random.default_rng(5).standard_normal((1, 4, D)).astype(np.float32)
    holes = np.array([[1, 0, 1, 0]])
    both = (answer(tmp_path / name, x=x, mask=holes) for name in ("m.onnx", "out.onnx"))
    np.testing.assert_allclose(next(both), next(both), rtol=0, atol=1e-5)


def test_a_graph_that_computes_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault after the sites were proved: one weight is changed on the way to the file."""
    honest = fusing.account_of

    def spoiling(file: Any, *rest: Any, **options: Any) -> Any:
        result = honest(file, *rest, **options)
        weight = file.model.graph.initializers["wo"]
        weight.const_value = ir.tensor(weight.const_value.numpy() * 1.001, name="wo")
        return result

    monkeypatch.setattr(fusing, "account_of", spoiling)
    source = attention(tmp_path / "m.onnx")
    with pytest.raises(CheckFailed, match=r"the fused graph differs from .*m\.onnx, batch=1"):
        fuse(source, tmp_path / "out.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_a_refused_site_fails_require_all_unless_it_is_excused(tmp_path: Path) -> None:
    source, output = unfusable(tmp_path / "m.onnx"), tmp_path / "out.onnx"
    with pytest.raises(CheckFailed, match=r"was refused \(weights-used") as raised:
        fuse(source, output, require="all")
    assert not output.exists()
    name = re.search(r"--excuse (\S+) or --excuse weights-used", raised.value.way_out)
    assert name
    with pytest.raises(CheckFailed, match="0 sites were lowered and 1 are required"):
        fuse(source, output, require=1)
    for excuse in (name[1], "weights-used"):
        fused = fuse(source, output, require="all", excuse=[excuse], overwrite=True)
        assert (fused.account["refused"], output.exists()) == (1, True)
    fused = fuse(source, output, excuse=["window"], overwrite=True)
    assert "--excuse window excused nothing" in fused.notes


def test_an_output_that_exists_is_kept(tmp_path: Path) -> None:
    source = attention(tmp_path / "m.onnx")
    for taken in ("out.onnx", "out.onnx.data"):
        (tmp_path / taken).write_text("mine")
        with pytest.raises(UsageError, match=f"{taken} exists; choose another -o"):
            fuse(source, tmp_path / "out.onnx")
        assert (tmp_path / taken).read_text() == "mine"
        (tmp_path / taken).unlink()
    with pytest.raises(UsageError, match="is a folder"):
        fuse(source, tmp_path)


def test_the_source_and_its_weights_are_never_the_output(tmp_path: Path) -> None:
    source = beside(attention(tmp_path / "m.onnx"))
    other = tmp_path / "w"
    other.symlink_to(source)
    before = contents(tmp_path)
    for output in (source, other):
        with pytest.raises(UsageError, match="would replace the file that is read"):
            fuse(source, output, overwrite=True)
    model = onnx.load(source)
    onnx.save_model(model, tmp_path / "n.onnx", save_as_external_data=True,
                    location="x.onnx.data", size_threshold=200)  # fmt: skip
    with pytest.raises(UsageError, match="would replace the file that is read"):
        fuse(tmp_path / "n.onnx", tmp_path / "x.onnx", overwrite=True)
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before


def test_operators_of_nobody_are_left_alone_and_the_site_beside_them_is_fused(
    tmp_path: Path,
) -> None:
    nodes = [*attention_nodes(17)[:-1], NODE("Twist", ["y_flat"], ["y"], domain="my.ops")]
    path = save(
        tmp_path / "m.onnx", nodes, [floats("x", "batch", "tokens", D)],
        [floats("y", "batch", "tokens", D)], constants(), domains=["my.ops"],
    )  # fmt: skip
    fused = fuse(path, tmp_path / "out.onnx", require="all")
    assert fused.account["lowered"] == 1
    assert fused.verification is None
    assert "nodes of my.ops are left as they are (1 Twist)" in fused.notes
    assert any("the whole graph was not compared" in note for note in fused.notes)
    assert "my.ops.Twist" in op_types(tmp_path / "out.onnx")


def test_quantised_projections_are_left_as_they_are(tmp_path: Path) -> None:
    numbers = constants()
    scale, zero = np.array(0.02, np.float32), np.array(0, np.int8)
    for role in "qkv":
        numbers[f"w{role}_8"] = np.clip(np.round(numbers.pop(f"w{role}") / 0.02), -127, 127).astype(
            np.int8
        )
    dequantise = [
        NODE("DequantizeLinear", [f"w{role}_8", "scale", "null"], [f"w{role}"]) for role in "qkv"
    ]
    path = save(
        tmp_path / "m.onnx", [*dequantise, *attention_nodes(17)],
        [floats("x", "batch", "tokens", D)], [floats("y", "batch", "tokens", D)],
        {**numbers, "scale": scale, "null": zero},
    )  # fmt: skip
    fused = fuse(path, tmp_path / "out.onnx")
    assert "quantised nodes are left as they are (3 DequantizeLinear)" in fused.notes
    assert fused.verification is not None
    assert op_types(tmp_path / "out.onnx").count("ai.onnx.DequantizeLinear") == 3
    stored = {t.name: t for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    np.testing.assert_array_equal(numpy_helper.to_array(stored["wq_8"]), numbers["wq_8"])


def test_a_window_of_opset_25_is_refused(tmp_path: Path) -> None:
    nodes = [NODE("Attention", ["q", "k", "v"], ["y"], name="near", is_causal=1,
                  left_window_size=1)]  # fmt: skip
    shape = ("batch", 2, "tokens", 4)
    path = save(tmp_path / "m.onnx", nodes, [floats(name, *shape) for name in "qkv"],
                [floats("y", *shape)], {}, 25)  # fmt: skip
    with pytest.raises(ExportError, match=r"Attention 'near' of .* has a window as opset 25"):
        fuse(path, tmp_path / "out.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_attention_nodes_of_newer_opsets_are_sites(tmp_path: Path) -> None:
    shape = ("batch", 2, "tokens", 4)
    for opset in (23, 24, 25, 26):
        nodes = [NODE("Attention", ["q", "k", "v"], ["y"], name="plain")]
        path = save(tmp_path / "m.onnx", nodes, [floats(name, *shape) for name in "qkv"],
                    [floats("y", *shape)], {}, opset)  # fmt: skip
        fused = fuse(path, tmp_path / "out.onnx", require="all", overwrite=True)
        assert (fused.account["total"], fused.account["lowered"]) == (1, 1)


def test_a_file_without_attention_is_converted_and_it_is_said(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [NODE("Neg", ["x"], ["y"])], [floats("x", 2)],
                [floats("y", 2)])  # fmt: skip
    fused = fuse(path, tmp_path / "out.onnx", require="all")
    assert (fused.account["total"], fused.notes[-1]) == (0, "there is no attention in this file")


@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
def test_another_target_is_compared_on_a_stand_in_and_it_is_said(
    tmp_path: Path, target: str
) -> None:
    fused = fuse(attention(tmp_path / "m.onnx"), tmp_path / "out.onnx", target=target)
    assert fused.verification is not None
    assert fused.notes[-1] == (
        f"the whole graph was compared on ort-cpu, a stand-in for ort-{target}"
    )
    assert fused.account["sites"][0]["proved"] != "run"


def test_the_api_is_the_packages(tmp_path: Path) -> None:
    assert attn_export.fuse is fuse
    fused = attn_export.fuse(attention(tmp_path / "m.onnx"), tmp_path / "out.onnx")
    assert isinstance(fused, Fused)
    assert fused.to_json().keys() == {
        "model", "sites", "total", "recognised", "lowered", "refused", "other", "rotary", "linear",
        "work", "output", "notes", "verify",
    }  # fmt: skip


@pytest.mark.slow
def test_more_than_two_gigabytes_by_path(tmp_path: Path) -> None:
    """Weights of 2.2 GB of zeros, sparse on the disk, beside one site."""
    rows = 2_200_000_000 // (4 * D)
    source = attention(tmp_path / "m.onnx")
    model = onnx.load(source)
    table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[rows, D])
    table.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "big.data"), ("offset", "0"), ("length", str(rows * D * 4))):
        table.external_data.add(key=key, value=value)
    model.graph.initializer.append(table)
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "tokens"])
    model.graph.input.append(ids)
    del model.graph.input[0]
    model.graph.node.insert(0, NODE("Gather", ["table", "ids"], ["x"]))
    source.write_bytes(model.SerializeToString())
    with (tmp_path / "big.data").open("wb") as file:
        file.truncate(rows * D * 4)
    fused = fuse(source, tmp_path / "out.onnx", require="all")
    assert fused.verification is not None
    assert fused.verification.passed
    assert (tmp_path / "out.onnx.data").stat().st_size >= rows * D * 4
