"""Convolution, batch normalisation, activation: the brick that convolutional models share."""

from __future__ import annotations

from torch import nn


class ConvNorm(nn.Sequential):
    """Same-padded convolution without bias, BatchNorm2d and an optional activation.

    (B, in_dim, H, W) to (B, out_dim, ceil(H / stride), ceil(W / stride)); floating dtype kept.
    Weights start as in "Delving Deep into Rectifiers" (He et al., 2015), so that the scale of the
    activations survives depth even before training.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        activation: nn.Module | None = None,
    ) -> None:
        if kernel % 2 == 0:
            raise ValueError(f"kernel {kernel} is even, so that the padding cannot be symmetric")
        conv = nn.Conv2d(in_dim, out_dim, kernel, stride, kernel // 2, groups=groups, bias=False)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        layers: list[nn.Module] = [conv, nn.BatchNorm2d(out_dim)]
        super().__init__(*layers, *([activation] if activation is not None else []))
