"""A small bundle that is loaded, whose lengths vary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_export import load
from attn_export.build import export
from attn_export.production.session import BundleSession

MODEL = '''
import torch
from torch import nn
from attn_export.models.spec import Axis

class Block(nn.Module):
    """One attention of two heads over tokens (B, S, 16), added to them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, tokens):
        B, S, D = tokens.shape
        q, k, v = self.qkv(tokens).view(B, S, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return tokens + y.transpose(1, 2).reshape(B, S, D)

def build():
    torch.manual_seed(7)
    axes = {0: Axis("batch", 1, 8), 1: Axis("length", 3, 64)}
    return Block(), {"tokens": torch.randn(2, 5, 16)}, {"tokens": axes}
'''


@pytest.fixture(scope="session")
def lengths_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens (batch 1 to 8, length 3 to 64, 16); graphs for the CPU, CUDA and OpenVINO."""
    folder = tmp_path_factory.mktemp("lengths")
    (folder / "model.py").write_text(MODEL)
    source = f"{folder / 'model.py'}:build"
    return export(source, folder / "bundle", targets=("cpu", "cuda", "openvino")).path


@pytest.fixture(scope="module")
def session(lengths_bundle: Path) -> Iterator[BundleSession]:
    """For tests that leave it as it was."""
    with load(lengths_bundle, "ort-cpu", threads=2) as opened:
        yield opened
