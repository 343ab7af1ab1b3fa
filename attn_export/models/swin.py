"""Swin Transformer, version 1 (Liu et al., 2021) and version 2 (Liu et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.attention.window import WindowAttention
from attn_export.models.preparing import imagenet
from attn_export.models.spec import Axis, ExportSpec


@dataclass(frozen=True)
class SwinConfig:
    """depths and heads: for each stage; a stage has half the side and twice the channels."""

    version: int = 1
    patch_size: int = 4
    channels: int = 3
    num_classes: int = 1000
    dim: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 7
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        if self.version not in (1, 2):
            raise ValueError(f"version {self.version} is neither 1 nor 2")
        if len(self.depths) != len(self.heads):
            raise ValueError(
                f"depths has {len(self.depths)} entries and heads {len(self.heads)}, one a stage"
            )
        for stage, heads in enumerate(self.heads):
            if self.dim * 2**stage % heads:
                raise ValueError(
                    f"dim {self.dim * 2**stage} of stage {stage} is not a multiple of heads {heads}"
                )


class Block(nn.Module):
    """Window attention and a perceptron; version 2 moves the norms behind them."""

    def __init__(self, config: SwinConfig, stage: int, shifted: bool) -> None:
        super().__init__()
        dim = config.dim * 2**stage
        shift = config.window // 2 if shifted else 0
        self.norm_last = config.version == 2
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, config.heads[stage], config.window, shift, config.version)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, config.mlp_ratio * dim),
            nn.GELU(),
            nn.Linear(config.mlp_ratio * dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_last:
            x = x + self.norm1(self.attn(x))
            return x + self.norm2(self.mlp(x))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    """Maps (B, H, W, D) to (B, ceil(H / 2), ceil(W / 2), 2 * D); odd sides get a row of zeros."""

    def __init__(self, dim: int, version: int) -> None:
        super().__init__()
        self.norm_last = version == 2
        self.norm = nn.LayerNorm(2 * dim if self.norm_last else 4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        row = 2 * torch.arange((x.shape[1] + 1) // 2, device=x.device)[:, None]
        column = 2 * torch.arange((x.shape[2] + 1) // 2, device=x.device)
        x = F.pad(x, (0, 0, 0, 1, 0, 1))  # read by the last row or column of an odd side
        corners = ((0, 0), (1, 0), (0, 1), (1, 1))
        x = torch.cat([x[:, row + down, column + right] for down, right in corners], dim=-1)
        y: Tensor = self.norm(self.reduction(x)) if self.norm_last else self.reduction(self.norm(x))
        return y  # (B, H/2, W/2, 2*D)


class Swin(nn.Module):
    """Images (B, C, H, W) of any size to logits (B, num_classes).

    Sides that are not multiples of the patch, or of a window, are padded with zeros where they
    occur. Attention's cost grows with the number of positions, and not with its square.
    """

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(
            config.channels, config.dim, config.patch_size, stride=config.patch_size
        )
        self.patch_norm = nn.LayerNorm(config.dim)
        layers: list[nn.Module] = []
        for stage, depth in enumerate(config.depths):
            if stage > 0:
                layers.append(PatchMerging(config.dim * 2 ** (stage - 1), config.version))
            layers.extend(Block(config, stage, shifted=index % 2 == 1) for index in range(depth))
        self.layers = nn.Sequential(*layers)
        last_dim = config.dim * 2 ** (len(config.depths) - 1)
        self.norm = nn.LayerNorm(last_dim)
        self.head = nn.Linear(last_dim, config.num_classes)

    def forward(self, image: Tensor) -> Tensor:
        patch = self.config.patch_size
        image = F.pad(image, (0, patch - 1, 0, patch - 1))  # read only where a patch is incomplete
        x = self.patch_norm(self.patches(image).permute(0, 2, 3, 1))  # (B, H, W, D)
        x = self.layers(x)  # (B, H / 2^(stages-1), W / 2^(stages-1), D * 2^(stages-1))
        x = self.norm(x).mean(dim=(1, 2))
        logits: Tensor = self.head(x)
        return logits


def random_images(
    generator: torch.Generator, sizes: Mapping[str, int], masked: bool
) -> dict[str, Tensor]:
    shape = (sizes["batch"], 3, sizes["height"], sizes["width"])
    return {"image": torch.randn(shape, generator=generator)}


def small_swin(version: int) -> ExportSpec:
    config = SwinConfig(
        version=version, num_classes=10, dim=64, depths=(2, 2), heads=(2, 4), window=4
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Swin(config).eval()
    sizes = {"batch": 2, "height": 96, "width": 112}
    axes = {0: Axis("batch", 1, 64), 2: Axis("height", 32, 512), 3: Axis("width", 32, 512)}
    return ExportSpec(
        module=module,
        inputs=random_images(torch.Generator().manual_seed(0), sizes, False),
        dynamic={"image": axes},
        outputs=("logits",),
        draw=random_images,
        preprocess={"image": imagenet(96, 112)},
        postprocess={"kind": "classify"},
    )


def swin() -> ExportSpec:
    """A small Swin with random weights."""
    return small_swin(version=1)


def swin_v2() -> ExportSpec:
    """A small Swin V2 with random weights."""
    return small_swin(version=2)
