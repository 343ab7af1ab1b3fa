"""A small residual convolutional backbone and the position codes of its maps, for the DETR models.

"Deep Residual Learning" (He et al., 2015) and "End-to-End Object Detection with Transformers"
(Carion et al., 2020).
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.conv import ConvNorm


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the first of them halves the map."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            ConvNorm(in_dim, out_dim, kernel=3, stride=2, activation=nn.ReLU()),
            ConvNorm(out_dim, out_dim, kernel=3),
        )
        self.shortcut = ConvNorm(in_dim, out_dim, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


class ConvBackbone(nn.Module):
    """Images (B, C, H, W) to maps (B, width, ceil(H / stride), ceil(W / stride)).

    Args:
        widths: channels at strides 4, 8, 16, ...; the map at stride 4 is not returned.

    Raises:
        ValueError: fewer than two widths.
    """

    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        if len(widths) < 2:
            raise ValueError(f"widths {widths} has fewer than two entries, so there is no stage")
        super().__init__()
        self.stem = nn.Sequential(
            ConvNorm(channels, widths[0], kernel=3, stride=2, activation=nn.ReLU()),
            ConvNorm(widths[0], widths[0], kernel=3, stride=2, activation=nn.ReLU()),
        )
        self.stages = nn.ModuleList(
            ResidualBlock(in_dim, out_dim) for in_dim, out_dim in pairwise(widths)
        )

    def forward(self, image: Tensor) -> list[Tensor]:
        x = self.stem(image)
        maps: list[Tensor] = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


def halve_mask(mask: Tensor, times: int) -> Tensor:
    """A bool mask (B, H, W) at the size of a map after so many strides of 2: every second cell.

    Pooling over single cells rather than resizing, which rounds differently from runtime to runtime
    where a side is not a multiple of the stride.
    """
    x = mask.unsqueeze(1).float()
    for _ in range(times):
        x = F.max_pool2d(x, kernel_size=1, stride=2)
    return x.squeeze(1) > 0.5


def sine_positions(
    mask: Tensor, dim: int, dtype: torch.dtype, temperature: float = 10000.0
) -> Tensor:
    """Codes (B, dim, height, width) of row and column, each as sines over dim / 2 channels.

    Rows and columns are counted over what the mask (B, height, width) allows, and scaled to one
    turn over the image, so that padding does not move them.
    """
    there = mask.to(dtype)
    y, x = there.cumsum(1), there.cumsum(2)  # (B, height, width)
    y = 2 * math.pi * y / (y[:, -1:, :] + 1e-6)
    x = 2 * math.pi * x / (x[:, :, -1:] + 1e-6)
    exponents = torch.arange(dim // 4, device=mask.device, dtype=dtype) / (dim // 4)
    angles = torch.stack([y, x], dim=-1).unsqueeze(-1) / temperature**exponents
    codes = torch.stack([angles.sin(), angles.cos()], dim=-1)  # (B, height, width, 2, dim/4, 2)
    return codes.flatten(3).permute(0, 3, 1, 2)
