"""Cross-covariance attention: "XCiT" (El-Nouby et al., 2021).

Attention between channels instead of tokens: an (H, H) matrix for each head, whatever the length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class CrossCovarianceConfig:
    dim: int = 64
    heads: int = 4

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")


class CrossCovarianceAttention(nn.Module):
    """Tokens (B, S, D) to (B, S, D); a masked token (key mask, bool (B, S)) is not looked at."""

    def __init__(self, config: CrossCovarianceConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.temperature = nn.Parameter(torch.ones(config.heads, 1, 1))
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, S, 3, N, H)
        q, k, v = qkv.permute(2, 0, 3, 4, 1).unbind(0)  # each (B, N, H, S): channels are the rows
        if key_mask is not None:
            q, k = (t.masked_fill(~key_mask[:, None, None, :], 0.0) for t in (q, k))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = (q @ k.transpose(-2, -1) * self.temperature).softmax(dim=-1)  # (B, N, H, H)
        y = weights @ v  # (B, N, H, S)
        out: Tensor = self.out(y.permute(0, 3, 1, 2).flatten(2))  # (B, S, D)
        return out
