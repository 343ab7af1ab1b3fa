"""Cross-attention: "Attention Is All You Need" (Vaswani et al., 2017), section 3.2.3.

Queries come from one sequence, keys and values from another, which has its own length and padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.attention.scaled_dot_product import (
    attention,
    key_mask_to_pairs,
    merge_heads,
    split_heads,
)


@dataclass(frozen=True)
class CrossAttentionConfig:
    """Sizes; `context_dim` is the width of the sequence that is attended to."""

    dim: int = 64
    context_dim: int = 48
    heads: int = 4
    fused: bool = True

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")


class CrossAttention(nn.Module):
    """Tokens (B, S, D) attend to a context (B, T, context_dim); the result is (B, S, D).

    `context_mask`, bool (B, T), is True where a context token is real. A row of the batch without
    any real context token attends to nothing, and its result is the bias of the output projection.
    """

    def __init__(self, config: CrossAttentionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.fused = config.fused
        self.query = nn.Linear(config.dim, config.dim)
        self.key_value = nn.Linear(config.context_dim, 2 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, context: Tensor, context_mask: Tensor | None = None) -> Tensor:
        q = split_heads(self.query(x), self.heads)  # (B, N, S, H)
        key_value = self.key_value(context).chunk(2, dim=-1)
        k, v = (split_heads(t, self.heads) for t in key_value)  # (B, N, T, H)
        mask = None if context_mask is None else key_mask_to_pairs(context_mask, x.shape[1])
        attend = F.scaled_dot_product_attention if self.fused else attention
        y: Tensor = self.out(merge_heads(attend(q, k, v, mask)))  # (B, S, D)
        return y
