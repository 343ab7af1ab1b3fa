"""Attention in the bodies of If, Loop and Scan is searched as in the main graph."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention.lowering import lower
from tests.attention import modules as m
from tests.attention.graphs import SIZES, exported, run, seeded


class Branch(m.Block):
    """Attention in both branches of a condition, one written by hand, one not."""

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        def by_hand(x: Tensor) -> Tensor:
            q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
            return self.proj(m.merge_heads((q @ k.mT * 0.3).softmax(-1) @ v))

        def fused(x: Tensor) -> Tensor:
            q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5)
            return self.proj(m.merge_heads(attended))

        return torch.cond(flag.sum() > 0, by_hand, fused, (x,))


def test_both_branches_of_a_condition_are_lowered() -> None:
    model = seeded(Branch)
    graph = exported(model, x=torch.randn(2, 5, m.D), flag=torch.ones(2))
    account = lower(graph.model, "ort-cpu", SIZES)
    assert (account.total, account.lowered, account.refused) == (2, 2, 0)
    assert sorted(outcome.site.scale for outcome in account.outcomes) == [
        np.float32(0.3).item(), 0.5
    ]  # fmt: skip
    assert not [n for n in graph.model.graph.all_nodes() if n.op_type == "Softmax"]
    for sign in (1.0, -1.0):
        x, flag = torch.randn(3, 9, m.D), torch.full((2,), sign)
        result = run(graph.model, x=x, flag=flag)
        np.testing.assert_allclose(result, model(x, flag).detach(), atol=3e-6)
