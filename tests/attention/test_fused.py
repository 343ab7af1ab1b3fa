"""com.microsoft attention that a file has already is a site that is lowered as it stands."""

from __future__ import annotations

import pytest
import torch

from attn_export.attention.lowering import lower
from tests.attention import modules as m
from tests.attention.graphs import SIZES, exported, seeded


@pytest.mark.parametrize(
    ("module", "op"),
    [
        (m.Separate, "com.microsoft.Attention"),
        (m.Cross, "com.microsoft.MultiHeadAttention"),
        (m.Causal, "com.microsoft.Attention"),
    ],
)
def test_what_was_lowered_once_is_lowered_still(module: type[m.Block], op: str) -> None:
    inputs = {"x": torch.randn(2, 5, m.D), "context": torch.randn(2, 4, m.D)}
    if module is not m.Cross:
        del inputs["context"]
    graph = exported(seeded(module), **inputs)
    (first,) = lower(graph.model, "ort-cpu", SIZES, "contrib").outcomes
    account = lower(graph.model, "ort-cpu", SIZES)
    (again,) = account.outcomes
    assert (account.total, account.lowered, account.refused) == (1, 1, 0)
    assert (first.lowering, again.lowering, again.proved) == (op, op, "no")
    assert again.reason == "it was fused before"
    kept = ("kind", "heads", "kv_heads", "head_size", "v_head_size", "tokens", "scale")
    assert [getattr(again.site, name) for name in kept] == [
        getattr(first.site, name) for name in kept
    ]


def test_a_runtime_without_such_an_op_is_told() -> None:
    graph = exported(seeded(m.Separate), x=torch.randn(2, 5, m.D))
    lower(graph.model, "ort-cpu", SIZES)
    (outcome,) = lower(graph.model, "ort-tensorrt", SIZES).outcomes
    assert (outcome.status, outcome.code) == ("refused", "no-kernel")
