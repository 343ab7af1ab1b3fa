"""Building blocks of the detector: cross-stage partial blocks, with and without attention.

After the figures of "YOLOv11: An Overview of the Key Architectural Enhancements" (Khanam and
Hussain, 2024) and "CSPNet" (Wang et al., 2019). Every block takes and returns (B, D, H, W).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attn_export.models.attention.position_sensitive import PositionSensitiveAttention
from attn_export.models.conv import ConvNorm


def conv(in_dim: int, out_dim: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> ConvNorm:
    return ConvNorm(in_dim, out_dim, kernel, stride, groups, activation=nn.SiLU())


class Bottleneck(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(conv(dim, dim // 2, kernel=3), conv(dim // 2, dim, kernel=3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class AttentionBlock(nn.Module):
    """Position-sensitive attention and a two-layer perceptron at each position, both residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attn = PositionSensitiveAttention(dim)
        self.mlp = nn.Sequential(conv(dim, 2 * dim), ConvNorm(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


def attention_bottleneck(dim: int) -> nn.Module:
    """What an attention C3k2 block repeats: a bottleneck, then attention."""
    return nn.Sequential(Bottleneck(dim), AttentionBlock(dim))


class C3k2(nn.Module):
    """Half of the channels pass through `depth` blocks; every stage is kept and merged."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        depth: int = 1,
        block: Callable[[int], nn.Module] = Bottleneck,
    ) -> None:
        super().__init__()
        hidden = out_dim // 2
        self.split = conv(in_dim, 2 * hidden)
        self.blocks = nn.ModuleList(block(hidden) for _ in range(depth))
        self.merge = conv((2 + depth) * hidden, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        stages = list(self.split(x).chunk(2, dim=1))
        for block in self.blocks:
            stages.append(block(stages[-1]))
        y: Tensor = self.merge(torch.cat(stages, dim=1))
        return y


class C2PSA(nn.Module):
    """Half of the channels pass through `depth` attention blocks, the other half goes round."""

    def __init__(self, dim: int, depth: int = 1) -> None:
        super().__init__()
        self.split = conv(dim, dim)
        self.blocks = nn.Sequential(*(AttentionBlock(dim // 2) for _ in range(depth)))
        self.merge = conv(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        kept, attended = self.split(x).chunk(2, dim=1)
        y: Tensor = self.merge(torch.cat([kept, self.blocks(attended)], dim=1))
        return y


class SPPF(nn.Module):
    """Spatial pyramid pooling: three 5x5 max pools in a row see windows of 5, 9 and 13."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduce = conv(dim, dim // 2)
        self.pool = nn.MaxPool2d(5, stride=1, padding=2)
        self.merge = conv(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        stages = [self.reduce(x)]
        for _ in range(3):
            stages.append(self.pool(stages[-1]))
        y: Tensor = self.merge(torch.cat(stages, dim=1))
        return y
