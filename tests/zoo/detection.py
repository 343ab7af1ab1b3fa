"""Detectors of the transformers package, small and with random weights."""

from __future__ import annotations

from typing import Any

from transformers import (
    DeformableDetrConfig,
    DeformableDetrForObjectDetection,
    DetrConfig,
    DetrForObjectDetection,
    DFineConfig,
    DFineForObjectDetection,
    HGNetV2Config,
    ResNetConfig,
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrResNetConfig,
    YolosConfig,
    YolosForObjectDetection,
)

from tests.zoo.entry import IMAGE, Entry, Made, image, make, small

DETECTR: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 9,
    "num_labels": 5,
}


def resnet(features: list[str]) -> ResNetConfig:
    return ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=features,
    )  # fmt: skip


def yolos(attention: str) -> Made:
    config = YolosConfig(
        **small(image_size=[IMAGE, IMAGE], patch_size=8, num_detection_tokens=6, num_labels=5)
    )
    return make(YolosForObjectDetection, config, attention), image()


def detr(attention: str) -> Made:
    config = DetrConfig(backbone_config=resnet(["stage4"]), **DETECTR)
    return make(DetrForObjectDetection, config, attention), image(64)


def deformable_detr(attention: str) -> Made:
    config = DeformableDetrConfig(
        backbone_config=resnet(["stage2", "stage3", "stage4"]), num_feature_levels=3, **DETECTR
    )
    return make(DeformableDetrForObjectDetection, config, attention), image(64)


REAL_TIME: dict[str, Any] = {
    "encoder_hidden_dim": 32,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "decoder_in_channels": [32, 32, 32],
    "encoder_in_channels": [16, 24, 32],
    "num_queries": 9,
    "num_labels": 5,
}


def rt_detr(attention: str) -> Made:
    backbone = RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = RTDetrConfig(backbone_config=backbone, **REAL_TIME)
    return make(RTDetrForObjectDetection, config, attention), image(64)


def d_fine(attention: str) -> Made:
    backbone = HGNetV2Config(
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 8, 16, 24],
        stage_mid_channels=[8, 8, 8, 8],
        stage_out_channels=[8, 16, 24, 32],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[1, 1, 1, 1],
        stage_kernel_size=[3, 3, 3, 3],
        hidden_sizes=[8, 16, 24, 32],
        out_features=["stage2", "stage3", "stage4"],
    )
    config = DFineConfig(backbone_config=backbone, **REAL_TIME)
    return make(DFineForObjectDetection, config, attention), image(64)


DETECTION = {
    "yolos": Entry(yolos, 2, "vit"),
    "detr": Entry(detr, 6, "bart"),
    "deformable-detr": Entry(deformable_detr, 2, "bart"),
    "rt-detr": Entry(rt_detr, 3, "bart"),
    "d-fine": Entry(d_fine, 3, "bart"),
}
