"""`decoder-lm`: a Llama-like decoder with a KV cache (Touvron et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.attention.causal_cache import (
    CausalCacheAttention,
    CausalCacheConfig,
    token_positions,
    visible_keys,
)
from attn_export.models.attention.rotary import rotary_angles
from attn_export.models.named_caches import (
    Past,
    cache_state,
    graph_names,
    named_caches,
    past_names,
    present_names,
)
from attn_export.models.spec import Axis, ExportSpec

BOS, EOS = 1, 2


@dataclass(frozen=True)
class DecoderLMConfig:
    """`window`: slots that a query sees, its own included (None: all before it)."""

    vocab: int = 512
    dim: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 352
    window: int | None = None
    rotary_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if min(self.vocab, self.layers, self.hidden) < 1:
            raise ValueError(f"every size must be positive: {self}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} hides every key; it must be at least 1")
        if self.attention().head_size % 2:
            raise ValueError(
                f"rotary embedding needs an even head size, not {self.dim // self.heads}"
            )

    def attention(self) -> CausalCacheConfig:
        return CausalCacheConfig(self.dim, self.heads, self.kv_heads)


class SwiGLU(nn.Module):
    """silu(W x) * V x, projected back: "GLU Variants Improve Transformer" (Shazeer, 2020)."""

    def __init__(self, config: DecoderLMConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    def __init__(self, config: DecoderLMConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = CausalCacheAttention(config.attention())
        self.norm2 = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        x: Tensor,
        visible: Tensor,
        angles: tuple[Tensor, Tensor],
        past: tuple[Tensor, Tensor] | tuple[None, None],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, key, value = self.attention(self.norm1(x), visible, angles, *past)
        x = x + y
        x = x + self.mlp(self.norm2(x))
        return x, (key, value)


class DecoderLM(nn.Module):
    """Prefill without a past, decode with one."""

    def __init__(self, config: DecoderLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_mask: Tensor | None = None,
        past: Past | None = None,
    ) -> tuple[Tensor, Tensor, Past]:
        """S new tokens after P cached ones.

        Args:
            input_ids: int64 (B, S).
            attention_mask: int64 (B, S), 0 for padding, on either side or between; all real if
                left out.
            past_mask: the same for the cache (B, P), as the call before returned it.
            past: keys and values (B, K, P, H) of each layer, given together with `past_mask`.

        Returns logits (B, S, V), the present mask (B, P + S) and the present caches.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if past_mask is not None:
            mask = torch.cat([past_mask, mask], dim=1)  # (B, T)
        mask, S = mask.bool(), input_ids.shape[1]
        x = self.embed(input_ids)  # (B, S, D)
        visible = visible_keys(mask, S, self.config.window)  # (B, 1, S, T)
        angles = self.angles(token_positions(mask, S), x.dtype)  # each (B, 1, S, H/2)
        present = []
        for i, block in enumerate(self.blocks):
            x, cache = block(x, visible, angles, (None, None) if past is None else past[i])
            present.append(cache)
        return self.head(self.norm(x)), mask.long(), present

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        head_size = self.config.attention().head_size
        return rotary_angles(positions.unsqueeze(1), head_size, self.config.rotary_theta, dtype)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor, steps: int) -> Tensor:
        """Greedy continuation (B, steps) of left-padded prompts (B, S)."""
        logits, mask, past = self(input_ids, attention_mask)
        tokens = [logits[:, -1:].argmax(dim=2)]  # (B, 1)
        for _ in range(steps - 1):
            logits, mask, past = self(tokens[-1], None, mask, past)
            tokens.append(logits.argmax(dim=2))
        return torch.cat(tokens, dim=1)


Inputs = dict[str, Tensor]
BATCH, TOKENS, PAST = Axis("batch", 1, 16), Axis("tokens", 1, 256), Axis("past", 1, 256)


def padding(rows: int, tokens: int, masked: bool, generator: torch.Generator) -> Tensor:
    """int64 (rows, tokens): ones, or with about a quarter of holes, the last token kept."""
    mask = torch.rand(rows, tokens, generator=generator) > (0.25 if masked else -1.0)
    mask[:, -1:] = True
    return mask.long()


def components(config: DecoderLMConfig) -> dict[str, ExportSpec]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DecoderLM(config).eval()
    prefill = named_caches(model, ("input_ids", "attention_mask"), 0).eval()
    decode = named_caches(model, ("input_ids", "past_mask"), config.layers).eval()
    caches, head_size = past_names(config.layers), config.attention().head_size

    def draw_prefill(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> Inputs:
        shape = (sizes["batch"], sizes["tokens"])
        return {
            "input_ids": torch.randint(3, config.vocab, shape, generator=g),
            "attention_mask": padding(*shape, masked, g),
        }

    def draw_decode(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> Inputs:
        B, P = sizes["batch"], sizes["past"]
        shape = (B, config.kv_heads, P, head_size)
        return {
            "input_ids": torch.randint(3, config.vocab, (B, 1), generator=g),
            "past_mask": padding(B, P, masked, g),
            **{name: torch.randn(shape, generator=g) for name in caches},
        }

    generator = torch.Generator().manual_seed(0)
    outputs = ("logits", "present_mask", *present_names(config.layers))
    generate = {"bos": BOS, "eos": EOS, "max_length": 64}
    return {
        "prefill": ExportSpec(
            module=prefill,
            inputs=draw_prefill(generator, {"batch": 2, "tokens": 6}, False),
            dynamic={name: {0: BATCH, 1: TOKENS} for name in ("input_ids", "attention_mask")},
            outputs=outputs,
            draw=draw_prefill,
            compare={"present_mask": "index"},
            generate=generate,
        ),
        "decode": ExportSpec(
            module=decode,
            inputs=draw_decode(generator, {"batch": 2, "past": 6}, False),
            dynamic={
                "input_ids": {0: BATCH},
                "past_mask": {0: BATCH, 1: PAST},
                **{name: {0: BATCH, 2: PAST} for name in caches},
            },
            names=graph_names(config.layers),
            outputs=outputs,
            draw=draw_decode,
            compare={"present_mask": "index"},
            state=(("present_mask", "past_mask", 1), *cache_state(config.layers)),
            generate=generate,
        ),
    }


def one_graph(config: DecoderLMConfig, capacity: int = 256) -> ExportSpec:
    """Prefill and decode in one graph: S tokens of each row behind P cached ones.

    `padding` may stand anywhere in the prompt, so that rows of several lengths are one batch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DecoderLM(config).eval()
    masks = ("input_ids", "attention_mask", "past_mask")
    caches, head_size = past_names(config.layers), config.attention().head_size
    tokens, past = Axis("tokens", 1, capacity), Axis("past", 0, capacity - 1)

    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> Inputs:
        B, S, P = sizes["batch"], sizes["tokens"], sizes["past"]
        shape = (B, config.kv_heads, P, head_size)
        return {
            "input_ids": torch.randint(3, config.vocab, (B, S), generator=g),
            "attention_mask": padding(B, S, masked, g),
            "past_mask": padding(B, P, masked, g),
            **{name: torch.randn(shape, generator=g) for name in caches},
        }

    return ExportSpec(
        module=named_caches(model, masks, config.layers).eval(),
        inputs=draw(torch.Generator().manual_seed(0), {"batch": 2, "tokens": 4, "past": 6}, False),
        dynamic={
            "input_ids": {0: BATCH, 1: tokens},
            "attention_mask": {0: BATCH, 1: tokens},
            "past_mask": {0: BATCH, 1: past},
            **{name: {0: BATCH, 2: past} for name in caches},
        },
        names=graph_names(config.layers),
        outputs=("logits", "present_mask", *present_names(config.layers)),
        draw=draw,
        compare={"present_mask": "index"},
        state=(("present_mask", "past_mask", 1), *cache_state(config.layers)),
        generate={"bos": BOS, "eos": EOS, "max_length": 64},
        cache_capacity=capacity,
    )


def decoder_lm_in_place() -> ExportSpec:
    """The small model as one graph whose caches are buffers of 256 positions."""
    return one_graph(DecoderLMConfig())


def decoder_lm() -> dict[str, ExportSpec]:
    """`prefill` and `decode` of a small model with seeded random weights.

    Both return `logits`, `present_mask` and the caches; `decode` takes them as `past_mask` and
    `past_key_values.N.key` / `.value`.
    """
    return components(DecoderLMConfig())


def decoder_lm_window() -> dict[str, ExportSpec]:
    """The same with a window of 8 tokens, so that it matters at short lengths."""
    return components(DecoderLMConfig(window=8))
