"""Kinds of sites: self where queries and keys come from one value, cross where they do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.attention.find import find
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import ExportSpec
from tests.attention import modules as m
from tests.attention.graphs import seeded


class Positions(m.Block):
    """DETR: positions are added to queries and keys, not to values, in two places."""

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = self.q(x + pos), self.k(x + pos), self.v(x)
        return F.scaled_dot_product_attention(*map(m.split_heads, (q, k, v)))


class Rotated(m.Block):
    def forward(self, x: Tensor, cos: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        return F.scaled_dot_product_attention(q * cos + q.flip(3), k * cos + k.flip(3), v)


class Cached(m.Block):
    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        return F.scaled_dot_product_attention(q, torch.cat([past, k], 2), torch.cat([past, v], 2))


class Decoder(m.Block):
    """Self-attention, then cross-attention of its result, both with residuals."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        x = x + m.merge_heads(F.scaled_dot_product_attention(q, k, v))
        q, k, v = self.q(x), self.k(context), self.v(context)
        return x + m.merge_heads(F.scaled_dot_product_attention(*map(m.split_heads, (q, k, v))))


X, CONTEXT, PAST = torch.randn(2, 5, m.D), torch.randn(2, 3, m.D), torch.randn(2, m.N, 4, m.H)


@pytest.mark.parametrize(("module", "inputs", "kinds"), [
    (m.Unbind, {"x": X}, ["self"]),
    (m.Causal, {"x": X}, ["causal"]),
    (m.Cross, {"x": X, "context": CONTEXT}, ["cross"]),
    (Positions, {"x": X, "pos": torch.randn(2, 5, m.D)}, ["self"]),
    (Rotated, {"x": X, "cos": torch.randn(2, 1, 5, 1)}, ["self"]),
    (Cached, {"x": X, "past": PAST}, ["self"]),
    (Decoder, {"x": X, "context": CONTEXT}, ["self", "cross"]),
])  # fmt: skip
def test_the_kind_of_a_site(
    module: type[nn.Module], inputs: dict[str, Tensor], kinds: list[str]
) -> None:
    graph = to_onnx(ExportSpec(seeded(module), inputs))
    assert [site.kind for site in find(graph.model)] == kinds


def test_a_site_states_its_sizes() -> None:
    graph = to_onnx(ExportSpec(seeded(m.Cross), {"x": X, "context": CONTEXT}))
    (site,) = find(graph.model)
    assert (site.heads, site.kv_heads, site.head_size, site.v_head_size) == (4, 4, 6, 6)
    assert (site.query_tokens, site.key_tokens, site.mask, site.causal) == (5, 3, "none", "none")
    assert site.scale == pytest.approx(6**-0.5)
