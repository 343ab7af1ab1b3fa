"""Positions that do not count: `--mask-output` of verify, and what an export declares."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from attn_export import verify
from attn_export.build import export
from attn_export.errors import UsageError
from tests.boundary import Cli

SOURCE = """
import torch
from torch import nn

class Tokens(nn.Module):
    def __init__(self, inverted):
        super().__init__()
        self.inverted = inverted

    def forward(self, x, mask):
        keep = mask == 0 if self.inverted else mask != 0
        y = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=keep[:, None, :])
        return y * PADDED(keep)

def made(inverted):
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    inputs = {"x": torch.randn(2, 4, 8), "mask": 1 - mask if inverted else mask}
    return Tokens(inverted), inputs, {name: {1: "length"} for name in inputs}

def build():
    return made(False)

def inverted():
    return made(True)
"""
ONES, HUGE = "torch.ones_like(keep[..., None])", "torch.where(keep, 1.0, 1e6)[..., None]"


def write(folder: Path, padded: str) -> str:
    """A source whose padded positions are multiplied by 1 or by a million."""
    path = folder / "tokens.py"
    path.write_text(SOURCE.replace("PADDED(keep)", padded))
    return str(path)


@pytest.fixture
def zeros_at_padding(tmp_path: Path) -> Path:
    """The exported graph with an output that is 0 at padded positions, as fused kernels give."""
    bundle = export(f"{write(tmp_path, ONES)}:build", tmp_path / "bundle")
    path = bundle.path / "model.cpu.onnx"
    model = onnx.load(path)
    for node in model.graph.node:
        node.output[:] = ["whole" if name == "output" else name for name in node.output]
    axes = helper.make_tensor("last", TensorProto.INT64, [1], [-1])
    model.graph.initializer.append(axes)
    model.graph.node.extend([
        helper.make_node("Cast", ["mask"], ["kept"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["kept", "last"], ["kept_column"]),
        helper.make_node("Mul", ["whole", "kept_column"], ["output"]),
    ])  # fmt: skip
    onnx.save(model, tmp_path / "zeros.onnx")
    return tmp_path / "zeros.onnx"


def test_padded_positions_are_left_out_and_that_is_said(
    zeros_at_padding: Path, cli: Cli, tmp_path: Path
) -> None:
    source = f"{tmp_path / 'tokens.py'}:build"
    assert not verify(zeros_at_padding, against=source).passed
    masked = verify(zeros_at_padding, against=source, mask_output={"output": "mask"})
    assert masked.passed
    excluded = {name: c.excluded for name, c in masked.runtimes["ort-cpu"].comparisons}
    assert excluded["batch=2 length=4"] == 8  # one position of 8 numbers
    ended = cli("verify", zeros_at_padding, "--against", source, "--mask-output", "output=mask")
    assert ended.code == 0
    assert "Positions of 'output' where 'mask' is 0 were left out." in ended.stdout


def test_an_export_declares_it_and_its_bundle_keeps_it(tmp_path: Path) -> None:
    source = f"{write(tmp_path, ONES)}:inverted"
    options = {"output": "not:mask"}
    bundle = export(source, tmp_path / "bundle", mask_output=options)
    assert bundle.manifest["outputs"][0]["mask"] == "not:mask"
    result = verify(bundle.path)
    assert (result.passed, result.masked) == (True, options)
    counts = {name: c.excluded for name, c in result.runtimes["ort-cpu"].comparisons}
    assert counts["batch=2 length=4"] == 8


@pytest.mark.parametrize("declared", [True, False])
def test_huge_numbers_at_padding_do_not_widen_what_is_allowed(
    tmp_path: Path, declared: bool
) -> None:
    """Whether the export or only the check leaves them out."""
    source = f"{write(tmp_path, HUGE)}:build"
    mask = {"output": "mask"}
    bundle = export(source, tmp_path / "bundle", mask_output=mask if declared else {})
    loose = max(case.allowed["output"]["all"] for case in bundle.cases())
    assert (loose > 1) is not declared
    rows = verify(bundle.path, mask_output=mask).runtimes["ort-cpu"].comparisons
    assert max(row.allowed for _, row in rows) < 1e-4


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        ({"outptu": "mask"}, "there is no output 'outptu'"),
        ({"output": "msk"}, "masked by 'msk', which is not an input"),
        ({"output": "x"}, "a mask .B, S. says which positions"),
    ],
)
def test_a_mask_that_there_is_not_is_refused(
    tmp_path: Path, mask: dict[str, str], sentence: str
) -> None:
    source = f"{write(tmp_path, ONES)}:build"
    with pytest.raises(UsageError, match=sentence):
        export(source, tmp_path / "bundle", mask_output=mask)
    assert not (tmp_path / "bundle").exists()
