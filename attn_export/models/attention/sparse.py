"""Sparse attention: a block-sparse pattern (Child et al., 2019; BigBird, Zaheer et al., 2020) and
top-k attention (Explicit Sparse Transformer, Zhao et al., 2019; Gupta et al., 2021).

Block-sparse attention computes only the blocks of its pattern: time and memory grow with S. Top-k
keeps the k best keys of a query, but has to score all of them to know which: time and memory grow
with S * T, and what it saves is noise in the result, not cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.attention.blocks import from_blocks, to_blocks
from attn_export.models.attention.scaled_dot_product import masked_softmax, merge_heads


@dataclass(frozen=True)
class BlockPattern:
    """Which blocks of keys a block of queries sees.

    Attributes:
        block: W, tokens in a block.
        offsets: blocks seen, counted from the query's own, e.g. (-1, 0, 1) for the neighbours.
        global_blocks: the first blocks of the sequence, which every query sees.
        causal: inside the pattern, a token sees no later token.
    """

    block: int = 16
    offsets: tuple[int, ...] = (-1, 0, 1)
    global_blocks: int = 1
    causal: bool = False

    def __post_init__(self) -> None:
        if self.block < 1 or self.global_blocks < 0:
            raise ValueError("block is at least 1 and global_blocks at least 0")
        if len(set(self.offsets)) != len(self.offsets):
            raise ValueError(f"offsets {self.offsets} name a block twice")
        if self.causal and any(offset > 0 for offset in self.offsets):
            raise ValueError(f"offsets {self.offsets} look ahead, which a causal pattern forbids")

    def mask(self, tokens: int) -> Tensor:
        """Bool (S, S): the dense mask that the blocks are tested against."""
        position = torch.arange(tokens)
        block = position // self.block
        step = block - block[:, None]
        seen = torch.isin(step, torch.tensor(self.offsets)) | (block < self.global_blocks)
        return seen & (position <= position[:, None]) if self.causal else seen


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockPattern,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention over the blocks of a pattern.

    Args:
        query, key: (B, N, S, H), of any length S.
        value: (B, N, S, Hv).
        key_mask: bool (B, S), True where a key may be attended to.

    Returns:
        (B, N, S, Hv); zeros for a query that sees no allowed key.
    """
    B, _, S, _ = query.shape
    W = pattern.block
    if key_mask is None:
        key_mask = query.new_ones(B, S, dtype=torch.bool)
    q = to_blocks(query.transpose(1, 2), W)  # (B, C, W, N, H)
    C = q.shape[1]

    own = torch.arange(C, device=query.device)
    first = torch.arange(pattern.global_blocks, device=query.device)
    near = own[:, None] + torch.tensor(pattern.offsets, device=query.device)  # (C, L)
    near = near.masked_fill(near < pattern.global_blocks, -1)  # never count a global block twice
    seen = torch.cat([first.expand(C, -1), near], dim=1)  # (C, M), M = global blocks + L
    exists = (seen >= 0) & (seen < C)

    def gather(x: Tensor) -> Tensor:
        return to_blocks(x, W)[:, seen.masked_fill(~exists, 0)]  # (B, C, M, W, ...)

    mask = (gather(key_mask) & exists[:, :, None]).flatten(2)[:, :, None]  # (B, C, 1, M*W)
    mask = mask.expand(-1, -1, W, -1)
    if pattern.causal:
        inside = torch.arange(W, device=query.device)
        key_position = (seen[:, :, None] * W + inside).flatten(1)  # (C, M*W)
        query_position = own[:, None] * W + inside  # (C, W)
        mask = mask & (key_position[:, None] <= query_position[:, :, None])

    k, v = (gather(x.transpose(1, 2)).flatten(2, 3) for x in (key, value))  # (B, C, M*W, N, H)
    q, k, v = (x.flatten(0, 1).transpose(1, 2) for x in (q, k, v))  # (B*C, N, ..., H)
    y = F.scaled_dot_product_attention(q, k, v, mask.flatten(0, 1)[:, None])  # (B*C, N, W, Hv)
    y = torch.unflatten(y.transpose(1, 2), 0, (B, -1))  # (B, C, W, N, Hv)
    return from_blocks(y, S).transpose(1, 2)


def top_k_attention(
    query: Tensor, key: Tensor, value: Tensor, k: int, mask: Tensor | None = None
) -> Tensor:
    """Attention over the k allowed keys that score highest; costs S * T like the dense form.

    Keys that tie with the k-th are all kept, so that the result depends on no sorting order.

    Args:
        query: (B, N, S, H).
        key: (B, N, T, H) with T at least k.
        value: (B, N, T, Hv).
        mask: bool, broadcastable to (B, N, S, T).

    Returns:
        (B, N, S, Hv).
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # (B, N, S, T)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    kept = scores >= scores.topk(k, dim=-1).values[..., -1:]
    return masked_softmax(scores, kept if mask is None else kept & mask) @ value


@dataclass(frozen=True)
class SparseAttentionConfig:
    """A layer with a block pattern, or with the k best keys where `top_k` is given."""

    dim: int = 64
    heads: int = 4
    pattern: BlockPattern = BlockPattern()
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} is not at least 1")


class SparseAttention(nn.Module):
    """Self-attention (B, S, D) to (B, S, D); key mask bool (B, S)."""

    def __init__(self, config: SparseAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        config = self.config
        qkv = self.qkv(x).unflatten(-1, (3, config.heads, -1))  # (B, S, 3, N, H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, N, S, H)
        if config.top_k is None:
            y = block_sparse_attention(q, k, v, config.pattern, key_mask)
        else:
            pairs = None if key_mask is None else key_mask[:, None, None, :]
            y = top_k_attention(q, k, v, config.top_k, pairs)
        out: Tensor = self.out(merge_heads(y))  # (B, S, D)
        return out
