"""What counts as attention, decided without the finder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_export.attention.count import count
from attn_export.attention.lowering import lower
from attn_export.parity.cases import sizes_of
from tests.attention import modules as m
from tests.attention.graphs import SIZES, exported, seeded


@pytest.mark.parametrize(("module", "expected"), [
    (m.Unbind, 1), (m.ByHand, 1), (m.ExpOverSum, 1), (m.Classifier, 0), (m.FixedBins, 0),
])  # fmt: skip
def test_a_softmax_counts_where_it_weighs_values(module: type[nn.Module], expected: int) -> None:
    graph = exported(seeded(module), x=torch.randn(2, 5, m.D))
    assert len(count(graph.model)) == expected


def test_two_blocks_count_twice_before_and_after_lowering() -> None:
    graph = exported(nn.Sequential(seeded(m.Unbind), seeded(m.Chunk)), input=torch.randn(2, 5, m.D))
    assert len(count(graph.model)) == 2
    lower(graph.model, "ort-cpu", sizes_of(graph.spec))
    assert len(count(graph.model)) == 2


def test_attention_in_a_branch_of_control_flow_counts() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, self.attend, lambda x: x.clone(), (x,))

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.transpose(1, 2)).softmax(-1) @ x

    graph = exported(Branch(), x=torch.randn(2, 5, m.D))
    assert len(count(graph.model)) == 1


def test_what_the_finder_misses_is_listed_as_refused() -> None:
    graph = exported(seeded(m.ByHand), x=torch.randn(2, 5, m.D))
    account = lower(graph.model, "ort-cpu", SIZES).to_json()
    assert account["total"] == account["recognised"] + account["refused"]
