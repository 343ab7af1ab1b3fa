"""Talking-heads attention (Shazeer et al., 2020), as in CaiT (Touvron et al., 2021).

The heads are mixed by one linear map before the softmax and by another after it, so that a head's
scores depend on every head's queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from attn_export.models.attention.scaled_dot_product import masked_softmax, merge_heads


@dataclass(frozen=True)
class TalkingHeadsConfig:
    dim: int = 64
    heads: int = 4

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")


class TalkingHeadsAttention(nn.Module):
    """Self-attention (B, S, D) to (B, S, D); key mask bool (B, S)."""

    def __init__(self, config: TalkingHeadsConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.scale = 1 / math.sqrt(config.dim // config.heads)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.mix_scores = nn.Linear(config.heads, config.heads)
        self.mix_weights = nn.Linear(config.heads, config.heads)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, S, 3, N, H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, N, S, H)
        scores = q * self.scale @ k.transpose(-2, -1)  # (B, N, S, S)
        scores = self._mix(self.mix_scores, scores)
        # Masked after the mixing: before it, one head's minus infinity would reach all of them.
        mask = None if key_mask is None else key_mask[:, None, None, :]
        weights = self._mix(self.mix_weights, masked_softmax(scores, mask))
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)  # the mixing has a bias
        y: Tensor = self.out(merge_heads(weights @ v))  # (B, S, D)
        return y

    def _mix(self, linear: nn.Linear, x: Tensor) -> Tensor:
        mixed: Tensor = linear(x.permute(0, 2, 3, 1))  # (B, S, S, N)
        return mixed.permute(0, 3, 1, 2)
