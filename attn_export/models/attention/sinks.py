"""Attention with learned sinks: gpt-oss (OpenAI, 2025), after "Efficient Streaming Language Models
with Attention Sinks" (Xiao et al., 2023).

Each head has a learned score that takes part in the softmax and has no value. What a query gives to
it goes nowhere, so that a query may attend to nothing: its weights sum to less than 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn_export.models.attention.scaled_dot_product import (
    causal_mask,
    key_mask_to_pairs,
    merge_heads,
    split_heads,
)


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None = None
) -> Tensor:
    """exp(s_j) / (exp(sink) + sum_j exp(s_j)) times v_j, summed over j.

    Args:
        query: (B, N, S, H).
        key: (B, N, T, H).
        value: (B, N, T, Hv).
        sinks: (N,), a score for each head.
        mask: bool, broadcastable to (B, N, S, T). The sink takes a blocked row whole: zeros.

    Returns:
        (B, N, S, Hv).
    """
    B, _, S, H = query.shape
    scores = query @ key.transpose(-2, -1) / math.sqrt(H)  # (B, N, S, T)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    sink_scores = sinks[:, None, None].expand(B, -1, S, -1)  # (B, N, S, 1)
    weights = torch.cat([scores, sink_scores], dim=-1).softmax(dim=-1)[..., :-1]
    return weights @ value


@dataclass(frozen=True)
class SinkConfig:
    dim: int = 64
    heads: int = 4
    kv_heads: int = 2

    def __post_init__(self) -> None:
        if self.dim % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"dim {self.dim}, heads {self.heads}, kv_heads {self.kv_heads}: each is to be a "
                "multiple of the next"
            )


class SinkAttention(nn.Module):
    """Causal grouped-query self-attention (B, S, D) to (B, S, D); key mask bool (B, S)."""

    def __init__(self, config: SinkConfig) -> None:
        super().__init__()
        self.config = config
        head_size = config.dim // config.heads
        self.sinks = nn.Parameter(torch.randn(config.heads))
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.kv_heads * head_size)
        self.value = nn.Linear(config.dim, config.kv_heads * head_size)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        S, N, K = x.shape[1], self.config.heads, self.config.kv_heads
        q = split_heads(self.query(x), N)  # (B, N, S, H)
        k = split_heads(self.key(x), K).repeat_interleave(N // K, dim=1)  # (B, N, S, H)
        v = split_heads(self.value(x), K).repeat_interleave(N // K, dim=1)
        mask = causal_mask(S, x.device)
        if key_mask is not None:
            mask = mask & key_mask_to_pairs(key_mask, S)  # (B, 1, S, S)
        y = sink_attention(q, k, v, self.sinks, mask)  # (B, N, S, H)
        out: Tensor = self.out(merge_heads(y))  # (B, S, D)
        return out
