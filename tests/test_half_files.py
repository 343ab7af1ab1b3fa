"""Existing files in half precision: their attention is found, lowered and proved, or explained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.fusing import fuse
from attn_export.runtimes import ort_cpu
from tests.file_graphs import D, attention, expected

STANDARD = "ai.onnx.Attention"


def halved(folder: Path, kind: int, *, wide_softmax: bool = False) -> Path:
    """`attention` with weights and inputs of this dtype; the softmax in float32 if asked for."""
    path = attention(folder / "m.onnx")
    model = onnx.load(path)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(dtype)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
    if wide_softmax:
        (at,) = [i for i, n in enumerate(model.graph.node) if n.op_type == "Softmax"]
        softmax = model.graph.node[at]
        widen = helper.make_node("Cast", [softmax.input[0]], ["wide"], to=TensorProto.FLOAT)
        narrow = helper.make_node("Cast", ["wide_weights"], [softmax.output[0]], to=kind)
        softmax.input[0], softmax.output[0] = "wide", "wide_weights"
        model.graph.node.insert(at, widen)
        model.graph.node.insert(at + 2, narrow)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("wide_softmax", [False, True])
def test_float16_is_lowered_to_the_op_that_has_a_kernel(tmp_path: Path, wide_softmax: bool) -> None:
    source = halved(tmp_path, TensorProto.FLOAT16, wide_softmax=wide_softmax)
    fused = fuse(source, tmp_path / "out.onnx", require="all")
    (site,) = fused.account["sites"]
    assert (site["lowering"], site["proved"]) == (STANDARD, "run")
    assert fused.verification is not None
    assert fused.verification.passed
    nodes = onnx.load(tmp_path / "out.onnx").graph.node
    assert not {"Softmax", "Cast"} & {node.op_type for node in nodes}
    x = np.random.default_rng(0).standard_normal((3, 5, D)).astype(np.float16)
    with ort_cpu.load(tmp_path / "out.onnx") as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], expected(x), atol=1e-2)


def test_float16_on_cuda_is_one_packed_op(tmp_path: Path) -> None:
    fused = fuse(halved(tmp_path, TensorProto.FLOAT16), tmp_path / "out.onnx", target="cuda")
    (site,) = fused.account["sites"]
    assert (site["lowering"], site["proved"]) == ("com.microsoft.Attention", "stand-in")


def test_bfloat16_is_lowered_for_cuda_and_proved_in_float32(tmp_path: Path) -> None:
    """The CPU provider has no kernels for it, so that the whole graph is not compared."""
    source = halved(tmp_path, TensorProto.BFLOAT16, wide_softmax=True)
    fused = fuse(source, tmp_path / "out.onnx", target="cuda")
    (site,) = fused.account["sites"]
    assert (site["lowering"], site["proved"]) == ("com.microsoft.Attention", "stand-in")
    assert fused.verification is None
    assert any("the whole graph was not compared" in note for note in fused.notes)
    model = onnx.load(tmp_path / "out.onnx")
    assert {t.data_type for t in model.graph.initializer} <= {
        TensorProto.BFLOAT16, TensorProto.INT64
    }  # fmt: skip


def test_bfloat16_has_no_kernel_on_a_cpu(tmp_path: Path) -> None:
    fused = fuse(halved(tmp_path, TensorProto.BFLOAT16), tmp_path / "out.onnx")
    (site,) = fused.account["sites"]
    assert (site["status"], site["code"]) == ("refused", "no-kernel")
    assert site["proved"] in ("stand-in", "no")
