"""Channel attention: "Squeeze-and-Excitation Networks" (Hu et al., 2018)."""

from __future__ import annotations

from torch import Tensor, nn


class SqueezeExcitation(nn.Module):
    """Scales each channel of a map (B, C, height, width) by a factor between 0 and 1.

    Args:
        channels: C.
        reduction: the factors come from a bottleneck of C / reduction values.

    Raises:
        ValueError: if `channels` is not a multiple of `reduction`.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        if channels % reduction:
            raise ValueError(f"channels {channels} is not a multiple of reduction {reduction}")
        self.reduce = nn.Linear(channels, channels // reduction)
        self.expand = nn.Linear(channels // reduction, channels)

    def forward(self, x: Tensor) -> Tensor:
        squeezed = x.mean(dim=(2, 3))  # (B, C)
        factors: Tensor = self.expand(self.reduce(squeezed).relu()).sigmoid()  # (B, C)
        return x * factors[:, :, None, None]
