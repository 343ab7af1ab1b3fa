"""What a model's answers depend on: the fast path, and rows that are not independent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export.build import export
from attn_export.models.spec import Axis, ExportSpec
from attn_export.parity.drawing import draw
from attn_export.source import Source
from attn_export.verifying.verification import verify


def bundle(module: nn.Module, inputs: dict[str, Tensor], folder: Path, **axes: dict[int, Axis]):
    spec = ExportSpec(module.eval(), inputs, axes)
    return export(Source("model", "model", {"model": spec}), folder / "bundle")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=pad)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_fast_path_that_answers_differently_is_said(tmp_path: Path) -> None:
    """PyTorch's fast path gives 0 at padded positions; the layers, and the bundle, do not."""
    pad = torch.zeros(2, 6, dtype=torch.bool)
    pad[1, 4:] = True
    made = bundle(Encoder(), {"x": torch.randn(2, 6, 16), "pad": pad}, tmp_path)
    assert any("PyTorch's fast path" in note for note in made.manifest["notes"])
    assert verify(made).passed
    own = next(case for case in made.cases() if case.name == "batch=2")
    np.testing.assert_array_equal(own.inputs["pad"], pad)


def test_a_layout_whose_first_axis_is_the_sequence_passes_and_is_said(tmp_path: Path) -> None:
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    made = bundle(SequenceFirst(), {"x": torch.randn(5, 2, 16)}, tmp_path)
    assert made.manifest["rows_mix"] == ["model"]
    assert any("axis 0 is not a batch" in note for note in made.manifest["notes"])
    assert verify(made).passed


def test_rows_of_a_real_batch_are_still_checked_alone(tmp_path: Path) -> None:
    made = bundle(nn.Linear(4, 3), {"input": torch.randn(2, 4)}, tmp_path)
    assert "rows_mix" not in made.manifest
    labels = [case for case, _ in verify(made).runtimes["ort-cpu"].comparisons]
    assert "batch=3, row 2 alone" in labels


def test_scalars_go_in_and_out(tmp_path: Path) -> None:
    class Step(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
            return {"y": x * t, "mean": (x * t).mean()}

    made = bundle(Step(), {"x": torch.randn(2, 4), "t": torch.tensor(0.5)}, tmp_path)
    assert made.cases()[0].outputs["mean"].shape == ()
    assert verify(made).passed


def test_every_other_masked_row_is_padded_at_its_end() -> None:
    spec = ExportSpec(nn.Identity(), {"mask": torch.ones(4, 6, dtype=torch.bool)})
    drawn = draw(spec, {}, True, seed=0)["mask"]
    assert drawn[1].tolist() == drawn[3].tolist() == [True] * 3 + [False] * 3
