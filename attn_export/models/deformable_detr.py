"""The encoder of Deformable DETR on the maps of a backbone (Zhu et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn_export.models.attention.deformable import DeformableAttention
from attn_export.models.conv_backbone import ConvBackbone, halve_mask, sine_positions
from attn_export.models.detr import padded_image_axes, padded_images
from attn_export.models.preparing import unit
from attn_export.models.spec import ExportSpec


@dataclass(frozen=True)
class DeformableDetrConfig:
    """widths: the backbone's channels at strides 4, 8, 16, ...; all but the first are levels."""

    channels: int = 3
    widths: tuple[int, ...] = (16, 32, 64, 128)
    dim: int = 128
    heads: int = 4
    points: int = 4
    layers: int = 2
    hidden_dim: int = 256

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.dim % 32:
            raise ValueError(f"dim {self.dim} is not a multiple of 32, the groups of its norm")
        if len(self.widths) < 2:
            raise ValueError("widths has fewer than two entries, so there is no map to attend to")

    @property
    def levels(self) -> int:
        return len(self.widths) - 1


class EncoderLayer(nn.Module):
    """Every position of every map reads a few points of all maps around itself."""

    def __init__(self, config: DeformableDetrConfig) -> None:
        super().__init__()
        self.attn = DeformableAttention(config.dim, config.heads, config.levels, config.points)
        self.norm1 = nn.LayerNorm(config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, config.hidden_dim),
            nn.ReLU(),
            nn.Linear(config.hidden_dim, config.dim),
        )
        self.norm2 = nn.LayerNorm(config.dim)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        reference: Tensor,
        like: list[Tensor],
        masks: list[Tensor],
    ) -> Tensor:
        y = self.attn(x + positions, reference, split_levels(x, like), masks)
        x = self.norm1(x + y)
        return self.norm2(x + self.mlp(x))


def join_levels(maps: list[Tensor]) -> Tensor:
    """L maps (B, D, height, width) to one sequence (B, S, D)."""
    return torch.cat([x.flatten(2) for x in maps], dim=2).mT


def split_levels(x: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The inverse of `join_levels`, with the sizes of the given maps."""
    sizes = [m.shape[-2:] for m in like]
    parts = x.mT.split([height * width for height, width in sizes], dim=2)
    return [part.unflatten(2, size) for part, size in zip(parts, sizes, strict=True)]


def reference_points(maps: list[Tensor]) -> Tensor:
    """Centre (S, 2) of every cell of every map, as x, y in 0..1."""
    points = []
    for x in maps:
        height, width = x.shape[-2:]
        row = (torch.arange(height, device=x.device, dtype=x.dtype) + 0.5) / height
        column = (torch.arange(width, device=x.device, dtype=x.dtype) + 0.5) / width
        yy, xx = torch.meshgrid(row, column, indexing="ij")
        points.append(torch.stack([xx, yy], dim=-1).flatten(0, 1))
    return torch.cat(points)


class DeformableDetrEncoder(nn.Module):
    """Backbone, one projection a map, and a stack of encoder layers with deformable attention.

    The cost of attention grows with the number of positions and not with its square: each reads
    levels * points samples a head.

    Args of `forward`:
        image: (B, C, H, W), any size.
        mask: (B, H, W) bool, True on the image and False on padding; None means no padding.

    Returns:
        The memory (B, S, D), S over the cells of all maps, finest map first.
    """

    def __init__(self, config: DeformableDetrConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = ConvBackbone(config.channels, config.widths)
        self.reduce = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, config.dim, 1), nn.GroupNorm(32, config.dim))
            for width in config.widths[1:]
        )
        self.level_codes = nn.Parameter(torch.randn(config.levels, config.dim, 1, 1))
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        maps = [
            reduce(x) for reduce, x in zip(self.reduce, self.backbone(image), strict=True)
        ]  # each (B, D, height, width)
        mask = torch.ones_like(image[:, 0], dtype=torch.bool) if mask is None else mask
        masks = [halve_mask(mask, 3 + level) for level in range(len(maps))]
        positions = join_levels(
            [
                sine_positions(m, self.config.dim, image.dtype) + code
                for m, code in zip(masks, self.level_codes, strict=True)
            ]
        )  # (B, S, D)
        reference = reference_points(maps)[None, :, None]  # (1, S, 1, 2), the same in every map
        reference = reference.expand(image.shape[0], -1, self.config.levels, -1)
        x = join_levels(maps)  # (B, S, D)
        for layer in self.layers:
            x = layer(x, positions, reference, maps, masks)
        return x


def deformable_detr() -> ExportSpec:
    """The encoder with random weights, on 128x160 images of which one is padded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = DeformableDetrEncoder(DeformableDetrConfig()).eval()
        for attention in module.modules():
            if isinstance(attention, DeformableAttention):  # zeros would weigh all points alike
                nn.init.normal_(attention.offsets.weight, std=0.1)
                nn.init.normal_(attention.weights.weight, std=0.1)
    sizes = {"batch": 2, "height": 128, "width": 160}
    return ExportSpec(
        module=module,
        inputs=padded_images(torch.Generator().manual_seed(0), sizes, True),
        dynamic=padded_image_axes(smallest=64),
        outputs=("memory",),
        draw=padded_images,
        preprocess={"image": {**unit(128, 160, fit="letterbox", align="corner"), "mask": "mask"}},
    )
