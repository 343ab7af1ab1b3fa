"""Multi-head self-attention: "Attention Is All You Need" (Vaswani et al., 2017), section 3.2.2.

`MultiHeadAttention` is written out; `TorchMultiheadAttention` and `TorchEncoder` show PyTorch's own
layers in the way people call them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.attention.scaled_dot_product import (
    attention_weights,
    key_mask_to_pairs,
    merge_heads,
    split_heads,
)


@dataclass(frozen=True)
class MultiHeadConfig:
    """Sizes of a multi-head layer.

    Attributes:
        head_size: H, the size of a query and of a key; dim / heads if None.
        v_head_size: Hv, the size of a value; head_size if None.
        packed: one projection makes query, key and value, or three make one each.
        return_weights: `forward` also returns the weights, which the fused call can't.
    """

    dim: int = 64
    heads: int = 4
    head_size: int | None = None
    v_head_size: int | None = None
    packed: bool = True
    bias: bool = True
    return_weights: bool = False

    def __post_init__(self) -> None:
        if self.head_size is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")

    @property
    def qk_size(self) -> int:
        """N * H."""
        return self.dim if self.head_size is None else self.heads * self.head_size

    @property
    def v_size(self) -> int:
        """N * Hv."""
        return self.qk_size if self.v_head_size is None else self.heads * self.v_head_size


class MultiHeadAttention(nn.Module):
    """Tokens (B, S, D) and a bool key mask (B, S) to (B, S, D), and weights if asked for."""

    def __init__(self, config: MultiHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.sizes = [config.qk_size, config.qk_size, config.v_size]
        if config.packed:
            self.qkv = nn.Linear(config.dim, sum(self.sizes), bias=config.bias)
        else:
            self.query = nn.Linear(config.dim, config.qk_size, bias=config.bias)
            self.key = nn.Linear(config.dim, config.qk_size, bias=config.bias)
            self.value = nn.Linear(config.dim, config.v_size, bias=config.bias)
        self.out = nn.Linear(config.v_size, config.dim, bias=config.bias)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        heads = self.config.heads
        q, k, v = (split_heads(t, heads) for t in self._project(x))  # (B, N, S, H), v has Hv
        mask = None if key_mask is None else key_mask_to_pairs(key_mask, x.shape[1])
        if not self.config.return_weights:
            y: Tensor = self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, mask)))
            return y  # (B, S, D)
        weights = attention_weights(q, k, mask)  # (B, N, S, S)
        return self.out(merge_heads(weights @ v)), weights

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.config.packed:
            return torch.split(self.qkv(x), self.sizes, dim=-1)
        return self.query(x), self.key(x), self.value(x)


class TorchMultiheadAttention(nn.Module):
    """`nn.MultiheadAttention` over (B, S, D), batch first.

    Its `key_padding_mask` (B, S) is the opposite of a key mask: True where a key is ignored. It
    gives NaN for a row in which every key is ignored.

    Args:
        return_weights: also return weights (B, S, S), or (B, N, S, S) if not averaged.
    """

    def __init__(
        self,
        dim: int = 64,
        heads: int = 4,
        return_weights: bool = False,
        average_weights: bool = True,
    ) -> None:
        super().__init__()
        self.return_weights = return_weights
        self.average_weights = average_weights
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, weights = self.attn(
            x,
            x,
            x,
            key_padding_mask=key_padding_mask,
            need_weights=self.return_weights,
            average_attn_weights=self.average_weights,
        )
        return (y, weights) if self.return_weights else y


class TorchEncoder(nn.Module):
    """`nn.TransformerEncoder` over (B, S, D) with a padding mask (B, S), True where ignored.

    In eval mode without gradients PyTorch takes a fast path of its own, whose answer at an ignored
    position is 0 and not what the layers give; at real tokens the two agree.
    """

    def __init__(self, dim: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.encoder(x, src_key_padding_mask=key_padding_mask)
        return y
