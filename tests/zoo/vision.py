"""Vision transformers of the transformers package, small and with random weights."""

from __future__ import annotations

import torch
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    Dinov2Config,
    Dinov2Model,
    MobileViTConfig,
    MobileViTForImageClassification,
    SamConfig,
    SamModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    SwinForImageClassification,
    Swinv2Config,
    Swinv2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from tests.zoo.entry import IMAGE, Entry, Made, image, make, small

PATCHES = {"image_size": IMAGE, "patch_size": 8}
WINDOWS = {
    "image_size": IMAGE,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}


def vit(attention: str) -> Made:
    return make(ViTForImageClassification, ViTConfig(**small(**PATCHES)), attention), image()


def dinov2(attention: str) -> Made:
    return make(Dinov2Model, Dinov2Config(**small(**PATCHES)), attention), image()


def beit(attention: str) -> Made:
    config = BeitConfig(**small(**PATCHES, use_relative_position_bias=True, out_indices=[0, 1]))
    return make(BeitForImageClassification, config, attention), image()


def swin(attention: str) -> Made:
    return make(SwinForImageClassification, SwinConfig(**WINDOWS), attention), image()


def swin_v2(attention: str) -> Made:
    return make(Swinv2ForImageClassification, Swinv2Config(**WINDOWS), attention), image()


def segformer(attention: str) -> Made:
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    )
    return make(SegformerForSemanticSegmentation, config, attention), image()


def mobilevit(attention: str) -> Made:
    config = MobileViTConfig(
        image_size=64,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
        num_attention_heads=4,
    )
    return make(MobileViTForImageClassification, config, attention), image(64)


def sam(attention: str) -> Made:
    """The image encoder with relative positions in windows, and the mask decoder."""
    config = SamConfig(
        vision_config={
            **small(image_size=64, patch_size=8, window_size=3, global_attn_indexes=[1]),
            "output_channels": 16,
            "mlp_dim": 64,
            "num_pos_feats": 8,
        },
        prompt_encoder_config={
            "hidden_size": 16,
            "image_size": 64,
            "patch_size": 8,
            "mask_input_channels": 4,
        },
        mask_decoder_config={
            "hidden_size": 16,
            "mlp_dim": 32,
            "num_attention_heads": 2,
            "iou_head_hidden_dim": 16,
        },
    )
    points = {
        "input_points": torch.rand(2, 1, 2, 2) * 64,
        "input_labels": torch.ones(2, 1, 2, dtype=torch.long),
    }
    return make(SamModel, config, attention), {**image(64), **points}


VISION = {
    "vit": Entry(vit, 2, "vit"),
    "dinov2": Entry(dinov2, 2, "vit"),
    "beit": Entry(beit, 2, "vit"),
    "swin": Entry(swin, 4, "swin"),
    "swin-v2": Entry(swin_v2, 4, "swin", attentions=("eager",)),
    "segformer": Entry(segformer, 2, "vit"),
    "mobilevit": Entry(mobilevit, 9, "vit", attentions=("eager",)),
    "sam": Entry(sam, 9, "sam2"),
}
