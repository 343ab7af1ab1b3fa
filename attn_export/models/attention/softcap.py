"""Attention with soft-capped scores: "Gemma 2" (Gemma Team, 2024), section 2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from attn_export.models.attention.scaled_dot_product import (
    causal_mask,
    key_mask_to_pairs,
    masked_softmax,
    merge_heads,
    split_heads,
)


def softcap_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softcap: float,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(c * tanh(Q K^T * scale / c)) V: no score exceeds the cap c.

    The mask comes after the cap: a score of minus infinity would be capped to -c, and a masked key
    would weigh something.

    Args:
        query: (B, N, S, H).
        key: (B, N, T, H).
        value: (B, N, T, Hv).
        mask: bool, broadcastable to (B, N, S, T).

    Returns:
        (B, N, S, Hv).
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale  # (B, N, S, T)
    scores = softcap * (scores / softcap).tanh()
    return masked_softmax(scores, mask) @ value


@dataclass(frozen=True)
class SoftcapConfig:
    """Sizes; `query_size` is what Gemma scales by, 1 / sqrt(query_size), and H if None."""

    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    softcap: float = 50.0
    query_size: int | None = None

    def __post_init__(self) -> None:
        if self.dim % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"dim {self.dim}, heads {self.heads}, kv_heads {self.kv_heads}: each is to be a "
                "multiple of the next"
            )
        if self.softcap <= 0:
            raise ValueError(f"softcap {self.softcap} is not positive")

    @property
    def head_size(self) -> int:
        return self.dim // self.heads


class SoftcapAttention(nn.Module):
    """Causal grouped-query self-attention (B, S, D) to (B, S, D); key mask bool (B, S)."""

    def __init__(self, config: SoftcapConfig) -> None:
        super().__init__()
        self.config = config
        self.scale = 1 / math.sqrt(config.query_size or config.head_size)
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_size, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_size, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        S, N, K = x.shape[1], self.config.heads, self.config.kv_heads
        q = split_heads(self.query(x), N)  # (B, N, S, H)
        k = split_heads(self.key(x), K).repeat_interleave(N // K, dim=1)  # (B, N, S, H)
        v = split_heads(self.value(x), K).repeat_interleave(N // K, dim=1)
        mask = causal_mask(S, x.device)
        if key_mask is not None:
            mask = mask & key_mask_to_pairs(key_mask, S)  # (B, 1, S, S)
        y = softcap_attention(q, k, v, self.config.softcap, mask, self.scale)
        out: Tensor = self.out(merge_heads(y))  # (B, S, D)
        return out
