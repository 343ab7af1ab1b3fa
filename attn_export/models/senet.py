"""SE-ResNet: "Squeeze-and-Excitation Networks" (Hu et al., 2018), at the size of small images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn_export.models.attention.channel import SqueezeExcitation
from attn_export.models.preparing import imagenet
from attn_export.models.spec import Axis, ExportSpec


@dataclass(frozen=True)
class SENetConfig:
    """Sizes; each stage after the first halves the map.

    Attributes:
        widths: channels of each stage.
        depth: residual blocks in a stage.
        reduction: of the squeeze-and-excitation bottleneck.
    """

    channels: int = 3
    num_classes: int = 10
    widths: tuple[int, ...] = (32, 64, 128)
    depth: int = 2
    reduction: int = 16

    def __post_init__(self) -> None:
        if not self.widths or any(width % self.reduction for width in self.widths):
            raise ValueError(
                f"widths {self.widths} are not all multiples of reduction {self.reduction}"
            )
        if self.depth < 1:
            raise ValueError(f"depth {self.depth} is not at least 1")


class SEBlock(nn.Module):
    """A residual block (B, C, h, w) to (B, width, h / stride, w / stride) with SE on its branch."""

    def __init__(self, channels: int, width: int, stride: int, reduction: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.attn = SqueezeExcitation(width, reduction)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels == width
            else nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y))
        y = self.attn(y)
        return torch.relu(self.shortcut(x) + y)


class SENet(nn.Module):
    """Images (B, channels, height, width) of any size to logits (B, num_classes)."""

    def __init__(self, config: SENetConfig) -> None:
        super().__init__()
        first = config.widths[0]
        self.stem = nn.Conv2d(config.channels, first, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(first)
        blocks = []
        channels = first
        for stage, width in enumerate(config.widths):
            for i in range(config.depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(SEBlock(channels, width, stride, config.reduction))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, config.num_classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.stem(image)).relu()  # (B, widths[0], height, width)
        x = self.blocks(x)  # (B, widths[-1], height / 4, width / 4)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))  # (B, num_classes)
        return logits


def senet() -> ExportSpec:
    """SENet with seeded random weights; batch, height and width are free."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = SENet(SENetConfig()).eval()

    def draw(
        generator: torch.Generator, sizes: Mapping[str, int], masked: bool
    ) -> dict[str, Tensor]:
        shape = (sizes["batch"], 3, sizes["height"], sizes["width"])
        return {"image": torch.randn(shape, generator=generator)}

    generator = torch.Generator().manual_seed(0)
    return ExportSpec(
        module=module,
        inputs=draw(generator, {"batch": 2, "height": 32, "width": 32}, False),
        dynamic={
            "image": {
                0: Axis("batch", 1, 64),
                2: Axis("height", 8, 256),
                3: Axis("width", 8, 256),
            }
        },
        outputs=("logits",),
        draw=draw,
        preprocess={"image": imagenet(32, 32)},
        postprocess={"kind": "classify"},
    )
