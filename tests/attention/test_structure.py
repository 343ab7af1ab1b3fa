"""What a mask allows is found by running its subgraph, whatever it looks like."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export.attention.find import find
from attn_export.attention.lowering import lower
from attn_export.attention.site import Site
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import Axis, ExportSpec
from tests.attention import modules as m
from tests.attention.graphs import BATCH, SIZES, TOKENS, exported, run, seeded

Mask = Callable[[int, int], Tensor]
ALIBI = torch.arange(4.0)[:, None, None]


def place(queries: int, keys: int) -> Tensor:
    """How far each key lies before its query, counted from the first of both."""
    return torch.arange(queries)[:, None] - torch.arange(keys)


MASKS: dict[str, tuple[Mask, tuple[str, str, int | None, bool]]] = {
    "tril": (lambda s, t: torch.ones(s, t, dtype=torch.bool).tril(),
             ("causal", "upper-left", None, True)),
    "added": (lambda s, t: torch.full((s, t), -torch.inf).triu(1),
              ("causal", "upper-left", None, True)),
    "from the end": (lambda s, t: place(s, t) >= s - t, ("causal", "lower-right", None, True)),
    "window": (lambda s, t: (place(s, t) >= 0) & (place(s, t) < 5),
               ("window", "upper-left", 5, True)),
    "wide window": (lambda s, t: (place(s, t) >= 0) & (place(s, t) < 300),
                    ("window", "upper-left", 300, True)),
    "both sides": (lambda s, t: place(s, t).abs() < 3, ("cross", "none", None, False)),
    "alibi": (lambda s, t: torch.where(place(s, t) < 0, -torch.inf, -place(s, t) * ALIBI),
              ("causal", "upper-left", None, False)),
    "relative": (lambda s, t: place(s, t) * 0.1, ("relative-bias", "none", None, False)),
}  # fmt: skip


class Masked(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, kv: Tensor) -> Tensor:
        mask = self.mask(q.shape[2], kv.shape[2])
        return nn.functional.scaled_dot_product_attention(q, kv, kv, attn_mask=mask)


@pytest.fixture(scope="module")
def sites() -> dict[str, Site]:
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks = nn.ModuleDict({name: Masked(mask) for name, (mask, _) in MASKS.items()})

        def forward(self, q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
            return tuple(masked(q, kv) for masked in self.masks.values())

    dynamic = {"q": {2: Axis("queries", 2, 600)}, "kv": {2: Axis("keys", 2, 600)}}
    inputs = {"q": torch.randn(1, 4, 5, 8), "kv": torch.randn(1, 4, 6, 8)}
    graph = to_onnx(ExportSpec(All().eval(), inputs, dynamic, draw=None))
    return {site.name.removeprefix("masks."): site for site in find(graph.model)}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_it_computes(sites: dict[str, Site], name: str) -> None:
    site = sites[name]
    assert (site.kind, site.causal, site.window, site.exact) == MASKS[name][1]


class Padded(m.Block):
    """Causal, and the padding of an input besides: Llama."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & padding[:, None, None]
        return self.proj(m.merge_heads(nn.functional.scaled_dot_product_attention(q, k, v, mask)))


def test_a_causal_mask_that_pads_as_well_is_causal_but_more_than_that() -> None:
    model = seeded(Padded)
    inputs = {"x": torch.randn(2, 5, m.D), "padding": torch.ones(2, 5, dtype=torch.bool)}
    axes = {0: BATCH, 1: TOKENS}
    graph = to_onnx(ExportSpec(model, inputs, dict.fromkeys(inputs, axes), ("y",)))
    (site,) = find(graph.model)
    assert (site.kind, site.causal, site.exact) == ("causal", "upper-left", False)


class Windowed(m.Block):
    """A dense mask: each query sees itself and one key before it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        mask = (place(x.shape[1], x.shape[1]) >= 0) & (place(x.shape[1], x.shape[1]) < 2)
        return self.proj(m.merge_heads(nn.functional.scaled_dot_product_attention(q, k, v, mask)))


def test_a_window_is_not_lost_at_lengths_beyond_it() -> None:
    model = seeded(Windowed)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    (outcome,) = lower(graph.model, "ort-cpu", SIZES).outcomes
    assert (outcome.status, outcome.site.window) == ("lowered", 2)
    x = torch.randn(3, 9, m.D)
    np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=3e-6)


class Given(nn.Module):
    """A mask from outside, of which one number blocks."""

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        mask = ~mask if self.blocks else mask
        return nn.functional.scaled_dot_product_attention(q, kv, kv, attn_mask=mask)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("tokens", [2, 5])
def test_a_mask_from_outside_of_fixed_sizes_is_not_causal(blocks: bool, tokens: int) -> None:
    """Two queries have one later key between them, which few draws let them see."""
    x = torch.randn(1, 1, tokens, 8)
    inputs = {"q": x, "kv": x, "mask": torch.ones(tokens, tokens, dtype=torch.bool)}
    graph = to_onnx(ExportSpec(Given(blocks).eval(), inputs))
    (site,) = find(graph.model)
    assert (site.causal, site.exact) == ("none", False)
