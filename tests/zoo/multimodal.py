"""Models of images, sound and text of the transformers package, small and with random weights."""

from __future__ import annotations

import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    SiglipConfig,
    SiglipModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests.zoo.entry import IMAGE, VOCABULARY, Entry, Made, image, make, padded, small, tokens
from tests.zoo.steps import decoder_step

TOWERS = {
    "vision_config": small(image_size=IMAGE, patch_size=8),
    "text_config": small(
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        projection_size=32,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def clip(attention: str) -> Made:
    model = make(CLIPModel, CLIPConfig(**TOWERS, projection_dim=32), attention)
    return model, {"input_ids": tokens(), "attention_mask": padded(), **image()}


def siglip(attention: str) -> Made:
    return make(SiglipModel, SiglipConfig(**TOWERS), attention), {"input_ids": tokens(), **image()}


def whisper_config() -> WhisperConfig:
    return WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=VOCABULARY,
        num_mel_bins=8, max_source_positions=20, max_target_positions=48, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip


def whisper(attention: str) -> Made:
    """Encoder and decoder in one graph."""
    model = make(WhisperForConditionalGeneration, whisper_config(), attention)
    return model, {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": tokens(6)}


def whisper_decoder(attention: str) -> Made:
    model = make(WhisperForConditionalGeneration, whisper_config(), attention)
    return decoder_step(model, model.model.decoder, layers=2, heads=4, size=8, width=32)


MULTIMODAL = {
    "clip": Entry(clip, 4, "clip"),
    "siglip": Entry(siglip, 5, "clip"),
    "whisper": Entry(whisper, 6, "bart"),
    "whisper-decoder": Entry(whisper_decoder, 4, "bart"),
}
