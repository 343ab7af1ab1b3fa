"""Sizes that never vary are constants, also where a graph reads them from shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from attn_export.fusing import fuse
from attn_export.onnx_files.onnx_file import read
from tests.file_graphs import D, H, attention_nodes, constants, floats, save

NODE = helper.make_node
ENDS = {"minus_one": np.array([-1]), "far": np.array([2**62]), "minus_one_0d": np.array(-1)}


def reads(pick: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Attention whose scores are divided by the root of a size that `pick` reads as "size"."""
    root = [
        NODE("Shape", ["q"], ["q_shape"]),
        *pick,
        NODE("Cast", ["size"], ["size_f"], to=TensorProto.FLOAT),
        NODE("Sqrt", ["size_f"], ["root"]),
    ]
    nodes = attention_nodes(17)
    at = next(i for i, node in enumerate(nodes) if "root" in node.input)
    return [*nodes[:at], *root, *nodes[at:]]


PICKS = {
    "slice": [NODE("Slice", ["q_shape", "minus_one", "far", "axis0"], ["size"])],
    "gather": [NODE("Gather", ["q_shape", "minus_one_0d"], ["size"])],
    "gather of one": [NODE("Gather", ["q_shape", "minus_one"], ["size"])],
}


def written(path: Path, pick: list[onnx.NodeProto]) -> Path:
    numbers = {**constants(), **ENDS}
    del numbers["root"]
    shape = ("batch", "tokens", D)
    return save(path, reads(pick), [floats("x", *shape)], [floats("y", *shape)], numbers)


@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS)
def test_a_scale_that_is_read_from_a_shape_is_a_constant(
    tmp_path: Path, pick: list[onnx.NodeProto]
) -> None:
    model = read(written(tmp_path / "m.onnx", pick)).model
    (division,) = [node for node in model.graph if node.op_type == "Div"]
    tensor = ir.convenience.get_const_tensor(division.inputs[1])
    assert tensor is not None
    assert tensor.numpy().reshape(-1) == pytest.approx([np.sqrt(H)])


def test_attention_with_such_a_scale_is_packed(tmp_path: Path) -> None:
    fused = fuse(written(tmp_path / "m.onnx", PICKS["slice"]), tmp_path / "out.onnx")
    (site,) = fused.account["sites"]
    assert (site["lowering"], site["scale"]) == (
        "com.microsoft.Attention", pytest.approx(H**-0.5)
    )  # fmt: skip


def test_a_size_that_varies_is_still_read(tmp_path: Path) -> None:
    """The second size of q is its tokens once it is transposed: no constant."""
    pick = [NODE("Slice", ["q_shape", "two_1d", "three_1d", "axis0"], ["size"])]
    nodes = reads(pick)
    numbers = {**constants(), **ENDS, "two_1d": np.array([2]), "three_1d": np.array([3])}
    del numbers["root"]
    shape = ("batch", "tokens", D)
    model = read(
        save(tmp_path / "m.onnx", nodes, [floats("x", *shape)], [floats("y", *shape)], numbers)
    ).model
    (division,) = [node for node in model.graph if node.op_type == "Div"]
    assert ir.convenience.get_const_tensor(division.inputs[1]) is None
