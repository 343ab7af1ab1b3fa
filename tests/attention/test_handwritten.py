"""Attention written out of matrix products and a softmax becomes the same ops as SDPA."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export.attention.lowering import lower
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import ExportSpec
from attn_export.parity.drawing import sizes_of
from tests.attention import modules as m
from tests.attention.graphs import BATCH, SIZES, TOKENS, exported, op_types, run, seeded

Scores = Callable[[Tensor, Tensor], Tensor]
S = m.H**-0.5

SCORES: dict[str, tuple[Scores, float]] = {
    "times scale": (lambda q, k: q @ k.mT * 0.3, 0.3),
    "over square root": (lambda q, k: q @ k.mT / math.sqrt(m.H), S),
    "scale on q": (lambda q, k: (q * 0.3) @ k.mT, 0.3),
    "scale on k": (lambda q, k: q @ (k * 0.3).mT, 0.3),
    "scale on transposed k": (lambda q, k: q @ (0.3 * k.mT), 0.3),
    "split over both": (lambda q, k: (q * math.sqrt(S)) @ (k * math.sqrt(S)).mT, S),
    "no scale": (lambda q, k: q @ k.mT, 1.0),
    "einsum": (lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k) * 0.3, 0.3),
}


class Written(m.Block):
    def __init__(self, scores: Scores) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        return self.proj(m.merge_heads(self.scores(q, k).softmax(-1) @ v))


@pytest.mark.parametrize("name", SCORES)
def test_the_scale_is_found_wherever_it_stands(name: str) -> None:
    scores, scale = SCORES[name]
    model = seeded(Written, scores=scores)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    (outcome,) = lower(graph.model, "ort-cpu", SIZES).outcomes
    assert outcome.lowering == "com.microsoft.Attention"
    assert outcome.site.scale == pytest.approx(scale, rel=1e-6)
    assert op_types(graph.model) == ["com.microsoft.Attention", "ai.onnx.MatMul", "ai.onnx.Add"]
    x = torch.randn(3, 9, m.D)
    np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=3e-6)


def test_a_score_of_four_at_half_scale() -> None:
    """Scores 4 and 0 give the first value the weight 0.98201; the default scale would give 0.73."""

    class Probe(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q * 0.5 @ k.mT).softmax(-1) @ v

    q, k = torch.zeros(2, 1, 1, 64), torch.zeros(2, 1, 2, 64)
    q[..., 0], k[..., 0, 0] = 8, 1
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1).expand(2, 1, 2, 1).contiguous()
    graph = exported(Probe(), q=q, k=k, v=v)
    lower(graph.model, "ort-cpu", sizes_of(graph.spec))
    assert run(graph.model, q=q, k=k, v=v).ravel().tolist() == pytest.approx(
        [0.98201] * 2, abs=1e-5
    )


class Capped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Buffer(torch.zeros(1, 1, 4, 4))
        self.mask[..., 3] = -torch.inf

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.mT * 0.5 / 2.0) * 2.0
        return (scores + self.mask).softmax(-1) @ v


def test_softcap_is_found_and_comes_before_the_mask() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 4, 8) for _ in range(3))
    graph = exported(Capped(), q=q, k=k, v=v)
    (outcome,) = lower(graph.model, "ort-cpu", sizes_of(graph.spec)).outcomes
    assert (outcome.site.softcap, outcome.site.scale, outcome.site.mask) == (2.0, 0.5, "additive")
    np.testing.assert_allclose(run(graph.model, q=q, k=k, v=v), Capped()(q, k, v), atol=3e-6)


class Gpt(m.Block):
    """nanoGPT: a causal mask cut out of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tril = nn.Buffer(torch.tril(torch.ones(1, 1, 65, 65)))

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        scores = (q @ k.mT * S).masked_fill(self.tril[:, :, :T, :T] == 0, -torch.inf)
        return self.proj(m.merge_heads(scores.softmax(-1) @ v))


class RelativeBias(m.Block):
    """T5: a bias for each head and distance, no scale."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(31, m.N)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        place = torch.arange(x.shape[1])
        distance = (place[None] - place[:, None]).clamp(-15, 15) + 15
        bias = self.bias(distance).permute(2, 0, 1)[None]
        return self.proj(m.merge_heads((q @ k.mT + bias).softmax(-1) @ v))


@pytest.mark.parametrize(("module", "mask"), [(Gpt, "bool"), (RelativeBias, "additive")])
def test_masks_made_of_weights_and_sizes_are_proved_as_they_are(
    module: type[nn.Module], mask: str
) -> None:
    model = seeded(module)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    (outcome,) = lower(graph.model, "ort-cpu", SIZES).outcomes
    assert (outcome.lowering, outcome.site.mask) == ("com.microsoft.Attention", mask)
    for batch, tokens in ((1, 1), (3, 9), (2, 33)):
        x = torch.randn(batch, tokens, m.D)
        np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=5e-6)


def test_a_query_that_a_mask_of_minus_infinity_blocks_keeps_its_nan() -> None:
    """PyTorch's softmax gives NaN there and standard Attention 0."""

    class Masked(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            return (q @ q.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ q

    q, mask = torch.randn(2, 2, 4, 8), torch.ones(2, 1, 4, 4) > 0
    graph = exported(Masked(), q=q, mask=mask)
    account = lower(graph.model, "ort-cpu", sizes_of(graph.spec))
    assert (account.lowered, account.refused) == (1, 0)
    mask[1, 0, 2] = False
    result = run(graph.model, q=q, mask=mask)
    assert np.isnan(result[1, :, 2]).all()
    np.testing.assert_allclose(result, Masked()(q, mask), atol=3e-6)


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)])
def test_attention_without_a_head_axis_is_found(shape: tuple[int, ...]) -> None:
    class Plain(nn.Module):
        def forward(self, points: Tensor) -> Tensor:
            return (points @ points.mT * 0.2).softmax(-1) @ points

    x = torch.randn(shape)
    graph = exported(Plain(), points=x)
    (outcome,) = lower(graph.model, "ort-cpu", sizes_of(graph.spec)).outcomes
    assert (outcome.lowering, outcome.site.heads) == ("ai.onnx.Attention", 1)
    np.testing.assert_allclose(run(graph.model, points=x), Plain()(x), atol=2e-6)


class ReturnsWeights(m.Block):
    """Some are set to 0 behind the softmax, so that rows no longer sum to 1."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        scores = q @ k.mT * S
        weights = torch.where(scores > 0, scores.softmax(-1), 0.0)
        return self.proj(m.merge_heads(weights @ v)), weights


class TalkingHeads(m.Block):
    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Conv2d(m.N, m.N, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        return self.proj(m.merge_heads(self.talk(q @ k.mT).softmax(-1) @ v))


class CappedMask(m.Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        bias = x.mean(2)[:, None, None]
        return self.proj(m.merge_heads((torch.tanh((q @ k.mT + bias) / 5) * 5).softmax(-1) @ v))


class Sinks(m.Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        scores = torch.cat([q @ k.mT, torch.zeros_like(q[..., :1])], -1)
        return self.proj(m.merge_heads(scores.softmax(-1)[..., :-1] @ v))


@pytest.mark.parametrize(("module", "reason"), [
    (ReturnsWeights, "weights-used: its weights are returned"),
    (TalkingHeads, "not-expressible: its scores go through Conv (its heads are mixed)"),
    (CappedMask, "mask: its mask is capped with the scores"),
    (Sinks, "not-expressible: its weights go through Slice (more keys, such as a sink,"
     " than there are values)"),
])  # fmt: skip
def test_what_standard_attention_cannot_express_is_refused_with_the_reason(
    module: type[nn.Module], reason: str
) -> None:
    model = seeded(module)
    graph = to_onnx(ExportSpec(model, {"x": torch.randn(2, 5, m.D)}))
    account = lower(graph.model, "ort-cpu", sizes_of(graph.spec))
    assert (account.total, account.lowered, account.refused) == (1, 0, 1)
    assert (len(account.outcomes), account.outcomes[0].reason) == (1, reason)


def test_values_weighed_from_the_right_are_found() -> None:
    """V^T @ weights^T, as convolutional attention writes it, with keys half the head size."""

    class Convolutional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Conv2d(16, 32, 1)

        def forward(self, x: Tensor) -> Tensor:
            B, _, height, width = x.shape
            q, k, v = self.qkv(x).view(B, 2, 16, height * width).split([4, 4, 8], dim=2)
            weights = (q.mT @ k * 0.5).softmax(-1)
            return (v @ weights.mT).reshape(B, 16, height, width)

    model = seeded(Convolutional)
    graph = to_onnx(ExportSpec(model, {"x": torch.randn(2, 16, 3, 5)}, {}, ("y",)))
    (outcome,) = lower(graph.model, "ort-cpu", sizes_of(graph.spec)).outcomes
    assert (outcome.lowering, outcome.proved) == ("ai.onnx.Attention", "run")
    assert (outcome.site.head_size, outcome.site.v_head_size, outcome.site.scale) == (4, 8, 0.5)
    x = torch.randn(3, 16, 3, 5)
    np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=3e-6)


def test_a_guard_against_nan_in_blocked_rows_is_no_obstacle() -> None:
    """Rows without any allowed key are 0 before and after, as in scaled_dot_product_attention."""

    class Guarded(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            weights = (q @ k.mT * 0.5).masked_fill(~mask, -torch.inf).softmax(-1)
            return torch.where(weights.isnan(), 0.0, weights) @ v

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 4, 8) for _ in range(3))
    mask = torch.rand(2, 1, 4, 4) > 0.4
    mask[1, 0, 2] = False
    inputs = {"q": q, "k": k, "v": v, "mask": mask}
    graph = exported(Guarded(), **inputs)
    (outcome,) = lower(graph.model, "ort-cpu", sizes_of(graph.spec)).outcomes
    assert (outcome.lowering, outcome.site.mask) == ("ai.onnx.Attention", "bool")
    result = run(graph.model, **inputs)
    np.testing.assert_allclose(result, Guarded()(**inputs), atol=3e-6)
    assert not result[1, :, 2].any()


def test_a_guard_that_puts_another_number_in_place_of_nan_is_refused() -> None:
    class Guarded(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            weights = (q @ q.mT).masked_fill(~mask, -torch.inf).softmax(-1)
            return torch.where(weights.isnan(), 0.25, weights) @ q

    graph = exported(Guarded(), q=torch.randn(2, 2, 4, 8), mask=torch.ones(2, 1, 4, 4) > 0)
    account = lower(graph.model, "ort-cpu", sizes_of(graph.spec))
    assert (account.lowered, account.refused) == (0, 1)


class Bert(m.Block):
    """A padding mask of ones and zeros, turned into the most negative number and added."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        bias = (1.0 - attention_mask[:, None, None].float()) * torch.finfo(torch.float32).min
        return self.proj(m.merge_heads((q @ k.mT * S + bias).softmax(-1) @ v))


def test_padding_masks_with_holes_and_without_any_key_give_pytorchs_answers() -> None:
    model = seeded(Bert)
    inputs = {"x": torch.randn(2, 5, m.D), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    axes = {0: BATCH, 1: TOKENS}
    graph = to_onnx(ExportSpec(model, inputs, dict.fromkeys(inputs, axes), ("y",)))
    (outcome,) = lower(graph.model, "ort-cpu", sizes_of(graph.spec)).outcomes
    assert (outcome.lowering, outcome.proved) == ("com.microsoft.Attention", "run")
    x = torch.randn(5, 6, m.D)
    rows = ["111111", "101010", "000111", "111000", "000000"]
    mask = torch.tensor([[int(digit) for digit in row] for row in rows])
    result = run(graph.model, x=x, attention_mask=mask)
    np.testing.assert_allclose(result, model(x, mask).detach(), atol=3e-6)
