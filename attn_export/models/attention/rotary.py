"""Rotary position embedding: "RoFormer" (Su et al., 2021), in the half-split layout of Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(
    positions: Tensor, head_size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., S, H/2) for integer positions (..., S).

    Pair i of a head turns by position * theta ** (-2i / H). The angles are computed in at least
    float32, since a half-precision position is inexact from 2,048 on. Raises ValueError for an
    odd head size.
    """
    if head_size % 2:
        raise ValueError(f"rotary embedding turns pairs, so head_size {head_size} must be even")
    exact = torch.promote_types(dtype, torch.float32)
    pair = torch.arange(0, head_size, 2, device=positions.device).to(exact)
    angles = positions.to(exact).unsqueeze(-1) * theta ** (-pair / head_size)  # (..., S, H/2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns (B, N, S, H) by angles (B, 1, S, H/2) or (S, H/2): the pairs are (x[i], x[i + H/2])."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
