"""Keys and values that are repeated for several query heads are given as they were before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export.attention.lowering import lower
from tests.attention import modules as m
from tests.attention.graphs import SIZES, exported, run, seeded

KV = 2


class Grouped(nn.Module):
    def __init__(self, repeat: str) -> None:
        super().__init__()
        self.repeat = repeat
        self.q = nn.Linear(m.D, m.N * m.H)
        self.k, self.v = nn.Linear(m.D, KV * m.H), nn.Linear(m.D, KV * m.H)

    def repeated(self, x: Tensor) -> Tensor:
        groups = m.N // KV
        if self.repeat == "repeat_interleave":
            return x.repeat_interleave(groups, dim=1)
        if self.repeat == "tiled":
            return x.repeat(1, groups, 1, 1)
        B, _, T, _ = x.shape
        return x[:, :, None].expand(B, KV, groups, T, m.H).reshape(B, m.N, T, m.H)

    def forward(self, x: Tensor) -> Tensor:
        q = m.split_heads(self.q(x))
        k, v = (self.repeated(m.split_heads(part(x), KV)) for part in (self.k, self.v))
        return m.merge_heads((q @ k.mT * 0.4).softmax(-1) @ v)


@pytest.mark.parametrize("repeat", ["expanded", "repeat_interleave", "tiled"])
def test_repeated_heads_are_grouped_and_tiled_ones_are_not(repeat: str) -> None:
    model = seeded(Grouped, repeat=repeat)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    (outcome,) = lower(graph.model, "ort-cpu", SIZES).outcomes
    assert outcome.site.kv_heads == (m.N if repeat == "tiled" else KV)
    assert outcome.status == "lowered"
    expands = [node for node in graph.model.graph if node.op_type in ("Expand", "Tile", "Concat")]
    assert repeat == "tiled" or not expands
    x = torch.randn(3, 9, m.D)
    np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=3e-6)
