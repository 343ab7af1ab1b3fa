"""Every way of writing attention by hand, in one graph: each becomes one standard Attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from attn_export.attention.lowering import lower
from attn_export.attention.site import Account
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import Axis, ExportSpec
from attn_export.runtimes import ort_cpu

N, H = 4, 8
LOW = torch.finfo(torch.float32).min
BATCH, TOKENS = Axis("batch", 1, 8), Axis("tokens", 2, 64)
SIZES = [{"batch": 3, "tokens": 7}, {"batch": 1, "tokens": 2}]

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""q, k, v (B, N, S, H) and a bool mask (B, S), True keeps -> (B, N, S, H)."""


def folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Heads in the batch for both products, out of it for the mask: BART, OPT, CLIP."""
    B, _, S, _ = q.shape
    q, k, v = (part.reshape(B * N, S, H) for part in (q * H**-0.5, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, N, S, S)
    scores = scores + torch.where(mask[:, None, None], 0.0, LOW)
    weights = scores.view(B * N, S, S).softmax(-1)
    return torch.bmm(weights, v).view(B, N, S, H)


def windows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Swin: a bias for each head, then a mask for each window that is split off the batch."""
    S = q.shape[2]
    place = torch.arange(S)
    bias = torch.arange(N)[:, None, None] * 0.1 * (place[:, None] - place)
    shift = torch.where((place[:, None] < 1) == (place < 1), 0.0, -100.0).expand(2, S, S)
    q, k, v = (torch.cat([part, part + 1]) for part in (q, k, v))  # (2 * B, N, S, H)
    scores = q @ k.mT * H**-0.5 + bias
    scores = scores.view(-1, 2, N, S, S) + shift[None, :, None]
    weights = scores.view(-1, N, S, S).softmax(-1)
    return (weights @ v)[: mask.shape[0]]


def relative_positions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SAM: queries against rows and columns of a map of keys, added to scores taken apart."""
    B = q.shape[0]
    q, k, v = (part[:, :, :1].expand(B, N, 6, H).reshape(B * N, 6, H) for part in (q, k, v))
    place = torch.arange(6 * 6 * H).reshape(6, 6, H).sin()
    across, down = place[:, :2], place[:, 2:5]
    scores = (q * 0.3) @ k.transpose(1, 2)
    rows = torch.einsum("bqc,qkc->bqk", q, down)
    columns = torch.einsum("bqc,qkc->bqk", q, across)
    scores = scores.view(B * N, 6, 3, 2) + rows[..., None] + columns[:, :, None]
    out = scores.view(B * N, 6, 6).softmax(-1) @ v
    return out.view(B, N, 6, H) + mask.sum() * 0


def keys_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Keys times queries, softmax over the second last axis, values from the left."""
    weights = (k @ q.mT * 0.5).softmax(-2)
    return (v.mT @ weights).mT


def tokens_last(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Channels first: (B, N, H, S)."""
    q, k, v = q.mT, k.mT, v.mT
    weights = (q.mT @ k).softmax(-1)
    return (v @ weights.mT).mT


def heads_behind_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, S, N, H)
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) / math.sqrt(H)
    scores = scores.masked_fill(~mask[:, None, None], LOW)
    return torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), v).transpose(1, 2)


def five_axes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Axial attention: rows of a map as a further batch axis."""
    q, k, v = (torch.stack([part, part * 2], 1) for part in (q, k, v))  # (B, 2, N, S, H)
    scores = q @ k.mT * 0.3 + torch.where(mask, 0.0, LOW)[:, None, None, None]
    return (scores.softmax(-1) @ v)[:, 1]


def one_key_for_all_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k[:, :1].mT * 0.5).softmax(-1) @ v[:, :1]


def temperature(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Swin v2: cosines times a factor for each head."""
    q, k = (nn.functional.normalize(part, dim=-1) for part in (q, k))
    return (q @ k.mT * torch.arange(1.0, N + 1)[:, None, None]).softmax(-1) @ v


def scaled_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    place = torch.arange(q.shape[2])
    bias = -(place[:, None] - place).abs().float()
    return ((q @ k.mT + bias) * 0.4).softmax(-1) @ v


def two_masks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A causal mask and a padding mask, one after the other."""
    S = q.shape[2]
    scores = (q @ k.mT).masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), LOW)
    return scores.masked_fill(~mask[:, None, None], LOW).softmax(-1) @ v


def exp_over_sum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(-1, keepdim=True)) @ v


def subtracted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 - (~mask[:, None, None]).float() * 1e9).softmax(-1) @ v


def filled_low(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(mask[:, None, None] == 0, -1e9).softmax(-1) @ v


def filled_infinite(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A query without any key gets NaN, and keeps it."""
    return (q @ k.mT * 0.3).masked_fill(~mask[:, None, None], -torch.inf).softmax(-1) @ v


def any_key_guard(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).masked_fill(~mask[:, None, None], LOW).softmax(-1)
    return torch.where(mask.any(-1)[:, None, None, None], weights, 0.0) @ v


def zeroed_again(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """ESPnet, wav2vec: the mask is repeated behind the softmax."""
    blocked = ~mask[:, None, None]
    weights = (q @ k.mT * 0.35).masked_fill(blocked, LOW).softmax(-1)
    return weights.masked_fill(blocked, 0.0) @ v


def padded_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Weights of padded queries are multiplied by 0."""
    return ((q @ k.mT * 0.3).softmax(-1) * mask[:, None, :, None].float()) @ v


def masked_positions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """DeBERTa: queries against positions are added, then padding is filled in."""
    place = torch.arange(H * H).reshape(H, H).sin()
    bias = (q @ place).mean(-1, keepdim=True) * torch.arange(q.shape[2]) * 0.1
    return (q @ k.mT + bias).masked_fill(~mask[:, None, None], LOW).softmax(-1) @ v


def log_of_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The logarithm of 0 blocks: a query without any key gets NaN, and keeps it."""
    return (q @ k.mT * 0.3 + mask[:, None, None].float().log()).softmax(-1) @ v


FORMS: list[Form] = [
    folded, windows, relative_positions, keys_first, tokens_last, heads_behind_tokens, five_axes,
    one_key_for_all_heads, temperature, scaled_bias, two_masks, exp_over_sum, subtracted,
    filled_low, filled_infinite, any_key_guard, zeroed_again, padded_queries, masked_positions,
    log_of_mask,
]  # fmt: skip


class One(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return self.form(q, k, v, mask)


class All(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forms = nn.ModuleDict({form.__name__: One(form) for form in FORMS})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return tuple(form(q, k, v, mask) for form in self.forms.values())


def drawn(batch: int, tokens: int) -> dict[str, Tensor]:
    """Masks with holes, left padding, right padding; the last row of three allows no key."""
    generator = torch.Generator().manual_seed(batch * 100 + tokens)
    q, k, v = (torch.randn(batch, N, tokens, H, generator=generator) for _ in range(3))
    mask = torch.rand(batch, tokens, generator=generator) > 0.4
    mask[:, 0] = True
    if batch > 2:
        mask[2] = False
    return {"q": q, "k": k, "v": v, "mask": mask}


@pytest.fixture(scope="module")
def lowered() -> tuple[ir.Model, Account]:
    inputs = drawn(2, 5)
    axes = {name: {0: BATCH, 2: TOKENS} for name in ("q", "k", "v")}
    names = tuple(form.__name__ for form in FORMS)
    graph = to_onnx(
        ExportSpec(All().eval(), inputs, {**axes, "mask": {0: BATCH, 1: TOKENS}}, names)
    )
    return graph.model, lower(graph.model, "ort-cpu", SIZES)


@pytest.mark.parametrize("name", [form.__name__ for form in FORMS])
def test_a_form_becomes_one_attention(lowered: tuple[ir.Model, Account], name: str) -> None:
    _, account = lowered
    found = [o for o in account.outcomes if o.site.name == f"forms.{name}"]
    assert [(o.lowering, o.proved) for o in found] == [("ai.onnx.Attention", "run")]


def test_no_softmax_is_left(lowered: tuple[ir.Model, Account]) -> None:
    model, account = lowered
    assert (account.total, account.refused) == (len(FORMS), 0)
    assert not [node.name for node in model.graph if node.op_type == "Softmax"]


@pytest.mark.parametrize(("batch", "tokens"), [(1, 2), (3, 9), (2, 33)])
def test_the_answers_are_pytorchs(
    lowered: tuple[ir.Model, Account], batch: int, tokens: int
) -> None:
    model, _ = lowered
    inputs = drawn(batch, tokens)
    with ort_cpu.load(ir.to_proto(model).SerializeToString(), threads=1) as session:
        answers = session.run({name: value.numpy() for name, value in inputs.items()})
    for form in FORMS:
        np.testing.assert_allclose(
            answers[form.__name__], form(**inputs), atol=1e-5, rtol=1e-4, err_msg=form.__name__
        )
