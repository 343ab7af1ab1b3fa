"""Attention in plain loops and float64, which the modules are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Score = Callable[[int, int, int, float], float]
"""(head, query, key, scaled dot product) -> score."""


def loop_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Callable[[int, int, int], bool] = lambda b, i, j: True,
    score: Score = lambda n, i, j, s: s,
    scale: float | None = None,
    sink: Callable[[int], float] | None = None,
) -> Tensor:
    """(B, N, S, H), (B, K, T, H), (B, K, T, Hv) to (B, N, S, Hv); a blocked row gives zeros."""
    q, k, v = (x.detach().double().numpy() for x in (query, key, value))
    B, N, S, H = q.shape
    group, T = N // k.shape[1], k.shape[2]
    scale = 1 / math.sqrt(H) if scale is None else scale
    out = np.zeros((B, N, S, v.shape[-1]))
    for b, n, i in np.ndindex(B, N, S):
        keys = [j for j in range(T) if allowed(b, i, j)]
        scores = [score(n, i, j, scale * float(q[b, n, i] @ k[b, n // group, j])) for j in keys]
        total = sum(math.exp(s) for s in scores) + (math.exp(sink(n)) if sink else 0.0)
        for j, s in zip(keys, scores, strict=True):
            out[b, n, i] += math.exp(s) / total * v[b, n // group, j]
    return torch.from_numpy(out)


def key_masks(batch: int, tokens: int) -> dict[str, Tensor]:
    """Bool (batch, tokens), True where a key may be attended to."""
    position = torch.arange(tokens).expand(batch, -1)
    length = (tokens - torch.arange(batch))[:, None].clamp(min=1)
    blocked = torch.ones(batch, tokens, dtype=torch.bool)
    blocked[0] = False
    return {
        "all": torch.ones(batch, tokens, dtype=torch.bool),
        "holes": (position * 7 + torch.arange(batch)[:, None]) % 3 != 1,
        "left-pad": position >= tokens - length,
        "right-pad": position < length,
        "blocked": blocked,
    }


MASKS = ("all", "holes", "left-pad", "right-pad", "blocked")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Float64 normal values of a seed of their own."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def packed_heads(qkv: torch.nn.Module, x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """What a packed projection makes of (B, S, D): query, key and value, each (B, N, S, H)."""
    B, S, _ = x.shape
    return tuple(
        part.reshape(B, S, heads, -1).permute(0, 2, 1, 3) for part in qkv(x).chunk(3, dim=-1)
    )


def joined(y: Tensor) -> Tensor:
    """(B, N, S, H) to (B, S, N*H)."""
    return torch.cat(list(y.unbind(1)), dim=-1)
