"""Causal linear attention as people write it becomes one LinearAttention node."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.attention.count import count, others
from attn_export.attention.linear import recurrences
from attn_export.attention.lower.linear_attention import NAME
from attn_export.attention.lowering import lower
from attn_export.attention.reasons import Reason
from attn_export.exporting.exporter import Graph, to_onnx
from attn_export.models.attention.linear import (
    RULES,
    LinearAttentionConfig,
    RecurrentAttention,
    linear_attention,
)
from attn_export.models.spec import ExportSpec
from tests.attention.graphs import BATCH, SIZES, TOKENS, op_types, run

N, H = 2, 4


def phi(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def features(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (part.unflatten(2, (N, H)).transpose(1, 2) for part in x.chunk(3, 2))
    return phi(q), phi(k), v


class Tril(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = features(x)
        weights = (q @ k.mT).tril()
        return weights @ v / weights.sum(-1, keepdim=True)


class Masked(nn.Module):
    """A 0/1 mask that is made from the length, scaled scores, a guard in the sum."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = features(x)
        weights = (q @ k.mT) * 0.5 * torch.tril(torch.ones(x.shape[1], x.shape[1]))
        return (weights @ v) / (weights.sum(-1, keepdim=True) + 1e-6)


class Filled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = features(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = torch.einsum("bnsd,bntd->bnst", q, k).masked_fill(later, 0)
        return torch.einsum("bnst,bntd->bnsd", weights, v) / weights.sum(-1)[..., None]


class RunningSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = features(x)
        state = torch.einsum("bnsd,bnse->bnsde", k, v).cumsum(2)
        total = torch.einsum("bnsd,bnsd->bns", q, k.cumsum(2))
        return torch.einsum("bnsd,bnsde->bnse", q, state) / total[..., None]


class BroadcastSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = features(x)
        state = (k[..., :, None] * v[..., None, :]).cumsum(2)
        return (q[..., None] * state).sum(-2) / (q * k.cumsum(2)).sum(-1, keepdim=True)


class Chunks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (N, H)).transpose(1, 2) for part in x.chunk(3, 2))
        return linear_attention(q, k, v, causal=True, chunk=4)


CAUSAL = [Tril, Masked, Filled, RunningSum, BroadcastSum]


def exported(module: nn.Module, width: int = 3 * N * H) -> Graph:
    inputs = {"x": torch.randn(2, 5, width)}
    return to_onnx(ExportSpec(module.eval(), inputs, {"x": {0: BATCH, 1: TOKENS}}, ("y",)))


def same_at_every_size(graph: Graph, module: nn.Module, width: int = 3 * N * H) -> None:
    for batch, tokens in ((1, 1), (2, 5), (3, 13)):
        x = torch.randn(batch, tokens, width)
        np.testing.assert_allclose(run(graph.model, x=x), module(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", CAUSAL)
def test_each_causal_form_is_one_node_and_no_softmax_site(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    graph = exported(module())
    assert count(graph.model) == []
    assert [entry.partition(":")[0] for entry in others(graph.model)] == ["linear"]
    account = lower(graph.model, "ort-cpu", SIZES)
    assert [found.lowering for found in account.linear] == [NAME]
    assert account.total == 0
    assert not {"ai.onnx.Trilu", "ai.onnx.CumSum", "ai.onnx.Einsum"} & set(op_types(graph.model))
    same_at_every_size(graph, module())


def test_equal_weights_give_the_running_mean() -> None:
    """q = k = 0, so that phi is 1 everywhere: values 0, 2, 7, 3 have the means 0, 1, 3, 3."""
    graph = exported(Tril())
    lower(graph.model, "ort-cpu", SIZES)
    x = torch.zeros(1, 4, 3 * N * H)
    x[..., 2 * N * H :] = torch.tensor([0.0, 2.0, 7.0, 3.0])[:, None]
    y = run(graph.model, x=x)
    np.testing.assert_allclose(y[0, 0, :, 0], [0, 1, 3, 3], rtol=1e-6)


def test_chunks_stay_unless_they_are_asked_for() -> None:
    torch.manual_seed(0)
    graph = exported(Chunks())
    (found,) = lower(graph.model, "ort-cpu", SIZES).linear
    assert found.lowering is None
    assert found.reasons[0].reason is Reason.SLOWER
    graph = exported(Chunks())
    (found,) = lower(graph.model, "ort-cpu", SIZES, "contrib").linear
    assert found.lowering == NAME
    same_at_every_size(graph, Chunks())


@pytest.mark.parametrize("rule", RULES)
def test_each_update_rule_of_a_scan_is_established_by_running_it(rule: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = RecurrentAttention(LinearAttentionConfig(N * H, N, rule=rule))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, state = self.layer(x, x.new_zeros(x.shape[0], N, H, H))
            return y, state

    inputs = {"x": torch.randn(2, 5, N * H)}
    module = Layer().eval()
    spec = ExportSpec(module, inputs, {"x": {0: BATCH, 1: TOKENS}}, ("y", "state"))
    graph = to_onnx(spec)
    assert [entry.partition(":")[0] for entry in others(graph.model)] == ["linear"]
    (found,) = lower(graph.model, "ort-cpu", SIZES).linear
    assert found.lowering == NAME
    assert "ai.onnx.Scan" not in op_types(graph.model)
    (node,) = [node for node in graph.model.graph if node.op_type == "LinearAttention"]
    assert node.attributes["update_rule"].as_string() == rule
    for batch, tokens in ((1, 1), (3, 13)):
        x = torch.randn(batch, tokens, N * H)
        y = run(graph.model, x=x)
        np.testing.assert_allclose(y, module(x)[0].detach(), rtol=1e-4, atol=1e-5)


def test_attention_to_all_tokens_has_no_op_and_says_so() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = features(x)
            return torch.einsum("bnsd,bnde->bnse", q, torch.einsum("bnsd,bnse->bnde", k, v))

    graph = exported(Both())
    (found,) = lower(graph.model, "ort-cpu", SIZES).linear
    assert found.lowering is None
    assert "earlier tokens" in found.reason


def test_an_anti_causal_triangle_is_refused_by_the_proof() -> None:
    class Later(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = features(x)
            return (q @ k.mT).triu() @ v

    graph = exported(Later())
    (found,) = lower(graph.model, "ort-cpu", SIZES).linear
    assert found.lowering is None
    assert found.reasons[0].reason is Reason.DISAGREES
    same_at_every_size(graph, Later())


def test_softmax_attention_and_padded_masks_are_not_taken_for_it() -> None:
    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = features(x)
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ v

    class Padded(nn.Module):
        """What a query may see depends on the input."""

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = features(x)
            seen = (x[..., 0] > 0)[:, None, None]
            return (q @ k.mT).tril().masked_fill(~seen, 0) @ v

    softmax = exported(Softmax())
    assert recurrences(softmax.model) == []
    assert len(count(softmax.model)) == 1
    assert others(softmax.model) == []
    assert recurrences(exported(Padded()).model) == []
