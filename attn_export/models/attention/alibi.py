"""Attention with linear biases: "Train Short, Test Long" (ALiBi, Press et al., 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.attention.scaled_dot_product import (
    causal_mask,
    key_mask_to_pairs,
    merge_heads,
)


def alibi_slopes(heads: int) -> Tensor:
    """(N,): 2^(-8/N), 2^(-16/N), .. for a power of two.

    Any other N takes the slopes of the power of two below it, then every second one of the next.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes)


def alibi_bias(slopes: Tensor, tokens: int) -> Tensor:
    """(N, S, S): -slope * (i - j) for key j behind query i."""
    position = torch.arange(tokens, device=slopes.device)
    return slopes[:, None, None] * (position - position[:, None])


@dataclass(frozen=True)
class AlibiConfig:
    dim: int = 64
    heads: int = 4

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")


class AlibiAttention(nn.Module):
    """Causal self-attention (B, S, D) to (B, S, D); key mask bool (B, S)."""

    slopes: Tensor

    def __init__(self, config: AlibiConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.register_buffer("slopes", alibi_slopes(config.heads), persistent=False)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        S = x.shape[1]
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, S, 3, N, H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, N, S, H)
        allowed = causal_mask(S, x.device)
        if key_mask is not None:
            allowed = allowed & key_mask_to_pairs(key_mask, S)  # (B, 1, S, S)
        bias = alibi_bias(self.slopes, S).masked_fill(~allowed, -math.inf)  # (N or B, N, S, S)
        y = F.scaled_dot_product_attention(q, k, v, bias)  # (B, N, S, H)
        out: Tensor = self.out(merge_heads(y))  # (B, S, D)
        return out
