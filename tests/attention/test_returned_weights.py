"""Attention whose weights are returned, or read by something else, keeps them exactly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export.attention.lowering import lower
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import Axis, ExportSpec
from attn_export.runtimes import ort_cpu
from tests.attention.graphs import seeded

B, N, H = 2, 2, 4
LOW = float(torch.finfo(torch.float32).min)
Function = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """As transformers write it: a bias of the most negative number."""
    bias = torch.where(mask[:, None, None], 0.0, LOW)
    weights = (q @ k.mT * 0.5 + bias).softmax(-1)
    return weights @ v, weights


def infinite(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """A query that may see no key gets NaN, and so do its weights."""
    weights = (q @ k.mT * 0.5).masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    return weights @ v, weights


def guarded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    weights = (q @ k.mT * 0.5).masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    weights = torch.where(weights.isnan(), 0.0, weights)
    return weights @ v, weights


def averaged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    weights = (q @ k.mT * 0.5).softmax(-1)
    return weights @ v, weights.mean(1)


def folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """As BART writes it: heads in the batch, weights apart and back again."""
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
    apart = scores.softmax(-1).view(q.shape[0], N, q.shape[2], k.shape[2])
    return torch.bmm(apart.view(scores.shape), v.flatten(0, 1)).view(q.shape), apart


def keys_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    weights = (k @ q.mT * 0.5).softmax(-2)
    return (v.mT @ weights).mT, weights


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    weights = (q @ k.mT * 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return weights @ v, weights


FUNCTIONS = (eager, infinite, guarded, averaged, folded, keys_first, causal)


class Wrapped(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return self.function(q, k, v, mask)


def inputs(batch: int, queries: int, keys: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(queries)
    q, k, v = (torch.randn(batch, N, n, H, generator=generator) for n in (queries, keys, keys))
    mask = torch.rand(batch, keys, generator=generator) > 0.4
    mask[-1], mask[0] = False, True  # a row of the batch that may see no key
    return {"q": q, "k": k, "v": v, "mask": mask}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_weights_that_are_returned_survive(function: Function) -> None:
    batch, queries, keys = Axis("batch", 1, 8), Axis("queries", 1, 64), Axis("keys", 1, 64)
    dynamic = {
        "q": {0: batch, 2: queries}, "k": {0: batch, 2: keys}, "v": {0: batch, 2: keys},
        "mask": {0: batch, 1: keys},
    }  # fmt: skip
    given = inputs(B, 5, 6)
    spec = ExportSpec(Wrapped(function).eval(), given, dynamic, ("y", "weights"))
    graph = to_onnx(spec)
    sizes = [{"batch": 3, "queries": 4, "keys": 7}, {"batch": 1, "queries": 2, "keys": 3}]
    (outcome,) = lower(graph.model, "ort-cpu", sizes).outcomes
    assert (outcome.lowering, outcome.proved) == ("ai.onnx.Attention", "run"), outcome.reason
    assert "Softmax" not in {node.op_type for node in graph.model.graph}
    with ort_cpu.load(_serialized(graph.model), threads=1) as session:
        for shape in ((3, 7, 4), (2, 1, 9)):
            made = inputs(*shape)
            expected = function(*(made[n].double() for n in "qkv"), made["mask"])
            found = session.run({n: made[n].numpy() for n in session_inputs(session)})
            for name, array in zip(("y", "weights"), expected, strict=True):
                np.testing.assert_allclose(found[name], array, atol=2e-6, err_msg=name)


def session_inputs(session: ort_cpu.OrtSession) -> list[str]:
    return [spec.name for spec in session.inputs]


def _serialized(model: object) -> bytes:
    import onnx_ir as ir

    assert isinstance(model, ir.Model)
    return ir.to_proto(model).SerializeToString()


@pytest.mark.parametrize("average", [True, False])
def test_the_weights_of_multihead_attention_survive(average: bool) -> None:
    """[B, S, S] where they are averaged, else [B, N, S, S]; rows sum to 1."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, N, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.attention(x, x, x, average_attn_weights=average)

    model = seeded(Attends)
    axes = {0: Axis("batch", 1, 8), 1: Axis("tokens", 1, 64)}
    graph = to_onnx(ExportSpec(model, {"x": torch.randn(2, 3, 8)}, {"x": axes}, ("y", "weights")))
    (outcome,) = lower(graph.model, "ort-cpu", [{"batch": 3, "tokens": 4}]).outcomes
    assert outcome.lowering == "ai.onnx.Attention", outcome.reason
    x = torch.randn(3, 5, 8)
    with ort_cpu.load(_serialized(graph.model), threads=1) as session:
        found = session.run({"x": x.numpy()})
    assert found["weights"].shape == ((3, 5, 5) if average else (3, N, 5, 5))
    np.testing.assert_allclose(found["weights"].sum(-1), 1, atol=1e-6)
    for name, expected in zip(("y", "weights"), model(x), strict=True):
        np.testing.assert_allclose(found[name], expected.detach(), atol=2e-6)


@pytest.mark.parametrize("runtime", ["ort-cuda", "ort-tensorrt"])
def test_where_the_op_does_not_return_weights_the_site_is_decomposed(runtime: str) -> None:
    given = inputs(B, 5, 6)
    graph = to_onnx(ExportSpec(Wrapped(guarded).eval(), given, {}, ("y", "weights")))
    (outcome,) = lower(graph.model, runtime, [{"batch": B}]).outcomes
    assert (outcome.lowering, outcome.proved) == ("decomposed", "stand-in")
    if runtime == "ort-cuda":
        assert (outcome.status, outcome.code) == ("refused", "weights-used")
    with ort_cpu.load(_serialized(graph.model), threads=1) as session:
        found = session.run({n: given[n].numpy() for n in session_inputs(session)})
    for name, expected in zip(("y", "weights"), guarded(*given.values()), strict=True):
        np.testing.assert_allclose(found[name], expected, atol=2e-6)
    assert not found["weights"][-1].any()
