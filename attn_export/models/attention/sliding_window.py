"""Sliding-window attention: Longformer (Beltagy et al., 2020), Mistral 7B (Jiang et al., 2023).

A window of w tokens counts the query itself. Causal: token i attends to i-w+1 .. i. Symmetric: to
i-w+1 .. i+w-1. The sequence is cut into blocks of w tokens; whatever a block may see then lies in
itself and its neighbours, so that time and memory grow with S * w and no (S, S) tensor exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.attention.blocks import from_blocks, to_blocks
from attn_export.models.attention.scaled_dot_product import merge_heads


def window_mask(tokens: int, window: int, causal: bool) -> Tensor:
    """Bool (S, S), True inside the window: the dense mask that the blocks are tested against."""
    position = torch.arange(tokens)
    distance = position[:, None] - position
    return (distance < window) & (distance >= 0 if causal else distance > -window)


def sliding_window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    causal: bool = True,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention in which a token sees only its window.

    Args:
        query, key: (B, N, S, H), of any length S.
        value: (B, N, S, Hv).
        window: w, the query itself included.
        key_mask: bool (B, S), True where a key may be attended to.

    Returns:
        (B, N, S, Hv); zeros for a query whose window holds no allowed key.
    """
    B, _, S, _ = query.shape
    ahead = 0 if causal else 1
    if key_mask is None:
        key_mask = query.new_ones(B, S, dtype=torch.bool)

    q = to_blocks(query.transpose(1, 2), window)  # (B, C, W, N, H)
    k = to_blocks(key.transpose(1, 2), window, behind=1, ahead=ahead)  # (B, C, 2W or 3W, N, H)
    v = to_blocks(value.transpose(1, 2), window, behind=1, ahead=ahead)
    real = to_blocks(key_mask, window, behind=1, ahead=ahead)[:, :, None]  # (B, C, 1, 2W or 3W)

    # Seen from its query, a key lies equally far in every block: one small mask serves them all.
    inside = window_mask(3 * window, window, causal)[window : 2 * window, : (2 + ahead) * window]
    mask = (inside.to(real.device) & real).flatten(0, 1)[:, None]  # (B*C, 1, W, 2W or 3W)
    q, k, v = (x.flatten(0, 1).transpose(1, 2) for x in (q, k, v))  # (B*C, N, ..., H)
    y = F.scaled_dot_product_attention(q, k, v, mask)  # (B*C, N, W, Hv)
    y = torch.unflatten(y.transpose(1, 2), 0, (B, -1))  # (B, C, W, N, Hv)
    return from_blocks(y, S).transpose(1, 2)


@dataclass(frozen=True)
class SlidingWindowConfig:
    dim: int = 64
    heads: int = 4
    window: int = 16
    causal: bool = True

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.window < 1:
            raise ValueError(f"window {self.window} is not at least 1: it counts the query itself")


class SlidingWindowAttention(nn.Module):
    """Self-attention (B, S, D) to (B, S, D) inside a window; key mask bool (B, S)."""

    def __init__(self, config: SlidingWindowConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.config.heads, -1))  # (B, S, 3, N, H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, N, S, H)
        y = sliding_window_attention(q, k, v, self.config.window, self.config.causal, key_mask)
        out: Tensor = self.out(merge_heads(y))  # (B, S, D)
        return out
