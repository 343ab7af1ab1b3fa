"""What the catalogues of packages share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_export.models.spec import ExportSpec

Made = tuple[nn.Module, Tensor] | ExportSpec


def images(size: int, channels: int = 3) -> Tensor:
    """(2, channels, size, size), seeded."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, channels, size, size, generator=generator)


def stirred(module: nn.Module) -> nn.Module:
    """In eval mode, with every parameter moved off its initial value.

    Position biases and layer scales start at zero, and a graph that loses them would agree.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return module.eval()
