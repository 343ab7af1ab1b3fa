"""A refusal of torch.export is one sentence with the user's own line, and nothing beside it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_export.errors import ExportError
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import ExportSpec


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x


class Chatty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("from the user's model", file=sys.stderr)
        return x[:, : int(x.shape[1] / 2)]


def refused(module: nn.Module, **inputs: Any) -> ExportError:
    with pytest.raises(ExportError) as caught:
        to_onnx(ExportSpec(module.eval(), inputs))
    return caught.value


def test_a_choice_by_value_names_its_line_and_a_way_out() -> None:
    error = refused(Branching(), x=torch.randn(2, 3))
    assert "test_refusals.py:" in error.observed
    assert "`if x.sum() > 0:`" in error.observed
    assert "torch.where" in error.way_out


def test_pytorch_prints_no_graph_beside_the_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    refused(Branching(), x=torch.randn(2, 3))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_what_the_users_model_prints_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    to_onnx(ExportSpec(Chatty().eval(), {"x": torch.randn(2, 4)}))
    assert "from the user's model" in capfd.readouterr().err
