"""Vision Transformer: "An Image is Worth 16x16 Words" (Dosovitskiy et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.preparing import imagenet
from attn_export.models.spec import Axis, ExportSpec


@dataclass(frozen=True)
class ViTConfig:
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    num_classes: int = 1000
    dim: int = 192
    depth: int = 12
    heads: int = 3
    mlp_ratio: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")

    @property
    def tokens(self) -> int:
        """S: the patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


class Attention(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        qkv = self.qkv(x).view(B, S, 3, self.heads, D // self.heads)  # (B, S, 3, N, H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, N, S, H)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)  # (B, N, S, H)
        y = y.transpose(1, 2).reshape(B, S, D)
        return self.proj(y)


class Block(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.dim
        self.norm1 = nn.LayerNorm(config.dim, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, hidden), nn.GELU(), nn.Linear(hidden, config.dim)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Images (B, C, image_size, image_size) to logits (B, num_classes)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(
            config.channels, config.dim, config.patch_size, stride=config.patch_size
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.positions = nn.Parameter(torch.zeros(1, config.tokens, config.dim))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.num_classes)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)  # (B, S-1, D)
        cls_token = self.cls_token.expand(x.shape[0], -1, -1)
        x = torch.cat([cls_token, x], dim=1) + self.positions  # (B, S, D)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])  # (B, num_classes)


def vit() -> ExportSpec:
    """ViT-tiny at 224 pixels with seeded random weights: images (B, 3, 224, 224) to `logits`."""
    config = ViTConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViT(config).eval()

    def draw(
        generator: torch.Generator, sizes: Mapping[str, int], masked: bool
    ) -> dict[str, Tensor]:
        shape = (sizes["batch"], config.channels, config.image_size, config.image_size)
        return {"image": torch.randn(shape, generator=generator)}

    return ExportSpec(
        module=model,
        inputs=draw(torch.Generator().manual_seed(0), {"batch": 2}, False),
        dynamic={"image": {0: Axis("batch", 1, 256)}},
        outputs=("logits",),
        draw=draw,
        preprocess={"image": {**imagenet(256, 256, fit="shortest"), "crop": {"size": 224}}},
        postprocess={"kind": "classify"},
    )
