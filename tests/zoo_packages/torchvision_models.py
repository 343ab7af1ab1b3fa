"""Models of the torchvision package, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo_packages.made import Made, stirred


@dataclass(frozen=True)
class Torchvision:
    """A torchvision architecture and the softmax attentions in it."""

    make: Callable[[Any], nn.Module]
    sites: int
    size: tuple[int, ...] = (3, 32, 32)

    def build(self) -> Made:
        import torchvision

        generator = torch.Generator().manual_seed(0)
        return stirred(self.make(torchvision.models)), torch.randn(
            2, *self.size, generator=generator
        )


def vit(models: Any) -> nn.Module:
    return models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64,
        num_classes=5,
    )  # fmt: skip


def swin(models: Any, block: str) -> nn.Module:
    transformer = models.swin_transformer
    version2 = {"downsample_layer": transformer.PatchMergingV2} if block.endswith("V2") else {}
    return models.SwinTransformer(
        patch_size=[2, 2], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4],
        num_classes=5, block=getattr(transformer, block), **version2,
    )  # fmt: skip


def maxvit(models: Any) -> nn.Module:
    return models.MaxVit(
        input_size=(64, 64), stem_channels=8, partition_size=4, block_channels=[16, 32],
        block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0, num_classes=5,
    )  # fmt: skip


def swin_video(models: Any) -> nn.Module:
    return models.video.SwinTransformer3d(
        patch_size=[2, 4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=[2, 4, 4], num_classes=5,
    )  # fmt: skip


def mvit_video(models: Any) -> nn.Module:
    """The second block halves the queries, keys and values are pooled: S differs from T."""
    mvit = models.video.mvit
    shared = {"input_channels": 16, "kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3]}
    blocks = [
        mvit.MSBlockConfig(
            num_heads=2, output_channels=16, stride_q=[], stride_kv=[1, 2, 2], **shared
        ),
        mvit.MSBlockConfig(
            num_heads=4, output_channels=32, stride_q=[1, 2, 2], stride_kv=[1, 1, 1], **shared
        ),
    ]
    return mvit.MViT(
        spatial_size=(32, 32), temporal_size=4, block_setting=blocks, residual_pool=True,
        residual_with_cls_embed=False, rel_pos_embed=True, proj_after_attn=True, num_classes=5,
    )  # fmt: skip


TORCHVISION: dict[str, Torchvision] = {
    "vit": Torchvision(vit, 2),
    "swin": Torchvision(partial(swin, block="SwinTransformerBlock"), 4),
    "swin-v2": Torchvision(partial(swin, block="SwinTransformerBlockV2"), 4),
    "maxvit": Torchvision(maxvit, 4, (3, 64, 64)),
    "swin-video": Torchvision(swin_video, 4, (3, 4, 32, 32)),
    "mvit-video": Torchvision(mvit_video, 2, (3, 4, 32, 32)),
    "mobilenet-v3": Torchvision(lambda models: models.mobilenet_v3_small(num_classes=5), 0),
}
