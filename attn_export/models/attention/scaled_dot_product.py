"""Scaled dot-product attention: "Attention Is All You Need" (Vaswani et al., 2017), section 3.2.1.

The formula stands next to PyTorch's fused call, so that the two can be compared. Masks are boolean
throughout: True where a query may attend to a key. A blocked row, a query whose mask allows no key,
gives zeros, which is what `F.scaled_dot_product_attention` answers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the last axis in which masked scores weigh nothing.

    Args:
        scores: (..., S, T), floating point.
        mask: bool, broadcastable to `scores`, or None to allow everything.
    """
    if mask is None:
        return scores.softmax(dim=-1)
    # A finite filler keeps a blocked row and its gradient free of NaN: the second fill empties it.
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0)


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(Q K^T * scale), by default with scale = 1 / sqrt(d_k).

    Args:
        query: (..., S, H).
        key: (..., T, H), of the same dtype.
        mask: bool, broadcastable to (..., S, T).

    Returns:
        (..., S, T): a row sums to 1, or to 0 where its mask allows nothing.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale  # (..., S, T)
    return masked_softmax(scores, mask)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(Q K^T * scale) V, with value (..., T, Hv) and the result (..., S, Hv)."""
    return attention_weights(query, key, mask, scale) @ value


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, S, N*H) to (B, N, S, H)."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, N, S, H) to (B, S, N*H)."""
    return x.transpose(1, 2).flatten(2)


def causal_mask(tokens: int, device: torch.device | None = None) -> Tensor:
    """Bool (S, S): token i may attend to token j where j <= i."""
    position = torch.arange(tokens, device=device)
    return position[:, None] >= position


def key_mask_to_pairs(key_mask: Tensor, queries: int) -> Tensor:
    """Bool (B, T) to (B, 1, S, T): the same allowed keys for each of S queries.

    The query axis is expanded, not left at 1: ONNX Runtime's Attention refuses a mask that
    broadcasts over queries.
    """
    return key_mask[:, None, None, :].expand(-1, -1, queries, -1)


class ScaledDotProductAttention(nn.Module):
    """Attention without weights of its own, as the formula or as PyTorch's fused call.

    Args:
        fused: call `F.scaled_dot_product_attention` instead of writing the formula out.
        scale: factor of the scores; 1 / sqrt(H) if None.
    """

    def __init__(self, fused: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.fused = fused
        self.scale = scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """(B, N, S, H), (B, N, T, H), (B, N, T, Hv), bool (B, 1 or N, S, T) to (B, N, S, Hv)."""
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        return attention(query, key, value, mask, self.scale)
