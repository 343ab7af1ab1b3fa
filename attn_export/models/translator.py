"""Transformer encoder-decoder: "Attention Is All You Need" (Vaswani et al., 2017)."""

from __future__ import annotations

import math
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
from attn_export.models.named_caches import Past


@dataclass(frozen=True)
class TranslatorConfig:
    source_vocab: int
    target_vocab: int
    dim: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int = 256
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim {self.dim} is not a multiple of twice heads {self.heads}")


class Attention(nn.Module):
    """Multi-head attention of x over a memory: itself in the encoder, the source in the decoder."""

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def split(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        return x.view(B, S, self.heads, D // self.heads).transpose(1, 2)  # (B, N, S, H)

    def merge(self, y: Tensor) -> Tensor:
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))  # (B, S, D)
        return out

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """x (B, S, D), memory (B, T, D), bool mask (B, 1, 1, T)."""
        q = self.split(self.query(x))  # (B, N, S, H)
        k, v = self.split(self.key(memory)), self.split(self.value(memory))  # (B, N, T, H)
        return self.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    def with_weights(self, x: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The same by the formula, and the weights' mean over the heads (B, S, T)."""
        q = self.split(self.query(x))  # (B, N, S, H)
        k, v = self.split(self.key(memory)), self.split(self.value(memory))  # (B, N, T, H)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])  # (B, N, S, T)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=3).masked_fill(~mask, 0.0)
        return self.merge(weights @ v), weights.mean(dim=1)


def feed_forward(config: TranslatorConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(config.dim, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.dim)
    )


class EncoderLayer(nn.Module):
    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(config), nn.LayerNorm(config.dim)
        self.mlp, self.norm2 = feed_forward(config), nn.LayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, x, mask)))
        x = x + self.dropout(self.mlp(x))  # (B, S, D)
        out: Tensor = self.norm2(x)
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        causal = CausalCacheConfig(config.dim, config.heads, config.heads, bias=True)
        self.attention, self.norm1 = CausalCacheAttention(causal), nn.LayerNorm(config.dim)
        self.cross, self.norm2 = Attention(config), nn.LayerNorm(config.dim)
        self.mlp, self.norm3 = feed_forward(config), nn.LayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        visible: Tensor,
        memory: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | tuple[None, None],
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        y, key, value = self.attention(x, visible, None, *past)
        x = self.norm1(x + self.dropout(y))
        y, weights = self.cross.with_weights(x, memory, mask)
        x = self.norm2(x + self.dropout(y))
        x = self.norm3(x + self.dropout(self.mlp(x)))
        return x, weights, (key, value)


class Embedding(nn.Module):
    """Scaled token embedding plus sinusoidal positions (section 3.5, sines before cosines)."""

    def __init__(self, vocab: int, config: TranslatorConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.normal_(self.tokens.weight, std=config.dim**-0.5)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(ids)  # (B, S, D)
        cos, sin = rotary_angles(positions, x.shape[2], 10000.0, x.dtype)  # (B, S, D/2)
        x = x * math.sqrt(x.shape[2]) + torch.cat([sin, cos], dim=-1)
        out: Tensor = self.dropout(x)
        return out


class Encoder(nn.Module):
    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.embed = Embedding(config.source_vocab, config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))

    def forward(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        """Both int64 (B, S) -> memory (B, S, D)."""
        mask = source_mask.bool()
        x: Tensor = self.embed(source_ids, token_positions(mask, mask.shape[1]))  # (B, S, D)
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        return x


class Decoder(nn.Module):
    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.embed = Embedding(config.target_vocab, config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.head = nn.Linear(config.dim, config.target_vocab)

    def forward(
        self, input_ids: Tensor, source_mask: Tensor, memory: Tensor, past: Past | None = None
    ) -> tuple[Tensor, Tensor, Past]:
        """New target tokens (B, L), source mask (B, T), memory (B, T, D), caches of P tokens.

        Returns logits (B, L, V), the newest token's weights over source tokens (B, T) in the last
        layer, and the caches with P + L tokens. Keys and values of the memory are computed anew
        at each call.
        """
        B, L = input_ids.shape
        P = 0 if past is None else past[0][0].shape[2]
        mask = source_mask.bool()[:, None, None, :]
        slots = torch.ones(B, P + L, dtype=torch.bool, device=input_ids.device)
        visible = visible_keys(slots, L)  # (B, 1, L, P + L)
        x = self.embed(input_ids, token_positions(slots, L))  # (B, L, D)
        present = []
        for i, layer in enumerate(self.layers):
            cache = (None, None) if past is None else past[i]
            x, weights, cache = layer(x, visible, memory, mask, cache)
            present.append(cache)
        return self.head(x), weights[:, -1], present


class Translator(nn.Module):
    """Encoder and decoder with teacher forcing, and greedy translation with caches."""

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Target tokens (B, L), the first one `<bos>`, to logits (B, L, V)."""
        memory = self.encoder(source_ids, source_mask)  # (B, T, D)
        logits: Tensor = self.decoder(target_ids, source_mask, memory)[0]
        return logits

    @torch.no_grad()
    def translate(
        self, source_ids: Tensor, source_mask: Tensor, bos: int, max_length: int
    ) -> tuple[Tensor, Tensor]:
        """Greedy: token ids (B, max_length) and attention (B, max_length, T)."""
        memory = self.encoder(source_ids, source_mask)  # (B, T, D)
        token, past = torch.full_like(source_ids[:, :1], bos), None
        tokens, weights = [], []
        for _ in range(max_length):
            logits, attention, past = self.decoder(token, source_mask, memory, past)
            token = logits.argmax(dim=2)  # (B, 1)
            tokens.append(token)
            weights.append(attention)
        return torch.cat(tokens, dim=1), torch.stack(weights, dim=1)
