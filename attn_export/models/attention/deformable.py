"""Multi-scale deformable attention: "Deformable DETR" (Zhu et al., 2020)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def deformable_attention(values: list[Tensor], points: Tensor, weights: Tensor) -> Tensor:
    """Each query reads a few points of each map, bilinearly, and weighs what it read.

    The cost is that of S * N * L * P samples of H numbers; no S x T tensor is built.

    Args:
        values: L maps (B, N, H, height, width), of any sizes.
        points: (B, S, N, L, P, 2) as x, y in 0..1 of the map's whole area (pixel centres lie at
            (i + 0.5) / size); what lies outside reads as zeros.
        weights: (B, S, N, L, P), which sum to 1 over L and P.

    Returns:
        (B, S, N * H), of the values' dtype.

    Raises:
        ValueError: the number of maps differs from that of the points or weights.
    """
    if not len(values) == points.shape[3] == weights.shape[3]:
        raise ValueError(
            f"there are {len(values)} maps, but points for {points.shape[3]} and weights for "
            f"{weights.shape[3]}"
        )
    grids = (2 * points - 1).transpose(1, 2).flatten(0, 1)  # (B*N, S, L, P, 2)
    sampled = [
        F.grid_sample(value.flatten(0, 1), grid, padding_mode="zeros", align_corners=False)
        for value, grid in zip(values, grids.unbind(2), strict=True)
    ]  # each (B*N, H, S, P)
    heads = points.shape[2]
    read = torch.cat(sampled, dim=-1).unflatten(0, (-1, heads))  # (B, N, H, S, L*P)
    weights = weights.flatten(3).transpose(1, 2).unsqueeze(2)  # (B, N, 1, S, L*P)
    return (read * weights).sum(dim=-1).flatten(1, 2).mT  # (B, S, N*H)


class DeformableAttention(nn.Module):
    """Deformable attention with its projections; offsets and weights come from the query alone.

    Args:
        dim: D.
        heads: N; D / N is H.
        levels: L, the number of maps.
        points: P, the samples of each map for each head.

    Raises:
        ValueError: dim is not a multiple of heads, or levels or points is not positive.
    """

    def __init__(self, dim: int, heads: int = 8, levels: int = 4, points: int = 4) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        if min(levels, points) < 1:
            raise ValueError(f"levels {levels} and points {points} are not both positive")
        self.heads, self.levels, self.points = heads, levels, points
        self.offsets = nn.Linear(dim, heads * levels * points * 2)
        self.weights = nn.Linear(dim, heads * levels * points)
        self.value = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in the paper: head n looks in direction n, its point p at a distance of p + 1."""
        angles = torch.arange(self.heads) * (2 * math.pi / self.heads)
        directions = torch.stack([angles.cos(), angles.sin()], dim=-1)  # (N, 2)
        directions = directions / directions.abs().amax(dim=-1, keepdim=True)
        distances = torch.arange(1, self.points + 1).reshape(1, 1, -1, 1)
        offsets = directions[:, None, None] * distances  # (N, 1, P, 2)
        with torch.no_grad():
            self.offsets.bias.copy_(offsets.expand(-1, self.levels, -1, -1).flatten())
        for weight in (self.offsets.weight, self.weights.weight, self.weights.bias):
            nn.init.zeros_(weight)
        for linear in (self.value, self.proj):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(
        self,
        query: Tensor,
        reference: Tensor,
        maps: list[Tensor],
        masks: list[Tensor] | None = None,
    ) -> Tensor:
        """Queries (B, S, D) around reference points to (B, S, D).

        Args:
            reference: (B, S, L, 2) as x, y in 0..1, one point in each map.
            maps: L maps (B, D, height, width).
            masks: L bool masks (B, height, width), True where a map holds something; what is
                masked reads as zeros, and its weight is not given to other points.

        Raises:
            ValueError: there are not L maps.
        """
        if len(maps) != self.levels:
            raise ValueError(f"there are {len(maps)} maps, but the module has {self.levels} levels")
        shape = (self.heads, self.levels, self.points)
        sizes = torch.stack([size_of(x) for x in maps])  # (L, 2)
        offsets = self.offsets(query).unflatten(-1, (*shape, 2))  # (B, S, N, L, P, 2)
        points = reference[:, :, None, :, None] + offsets / sizes[:, None]
        weights = self.weights(query).unflatten(-1, (self.heads, -1)).softmax(dim=-1)
        weights = weights.unflatten(-1, shape[1:])  # (B, S, N, L, P)
        values = [self.value(x.flatten(2).mT) for x in maps]  # each (B, T, D)
        if masks is not None:
            values = [
                v * mask.flatten(1).unsqueeze(-1) for v, mask in zip(values, masks, strict=True)
            ]
        split = [
            v.mT.unflatten(1, (self.heads, -1)).unflatten(-1, x.shape[-2:])
            for v, x in zip(values, maps, strict=True)
        ]  # each (B, N, H, height, width)
        out: Tensor = self.proj(deformable_attention(split, points, weights))
        return out


def size_of(x: Tensor) -> Tensor:
    """Width and height (2,) of a map, as a tensor so that they stay dynamic at export."""
    height, width = x.shape[-2:]
    return torch.stack([x.new_full((), width), x.new_full((), height)])
