"""What the catalogue's files share: an entry, seeded weights, images and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from attn_export.models.spec import Axis, ExportSpec

BATCH, TOKENS = Axis("batch", 1, 8), Axis("tokens", 2, 48)
VOCABULARY = 99
IMAGE = 32

Made = ExportSpec | tuple[nn.Module, dict[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    """A model of the catalogue.

    Attributes:
        build: attention implementation -> what a factory returns.
        sites: softmax attentions in it.
        model_type: the name that onnxruntime.transformers knows its family by.
        attentions: the implementations that transformers has for it.
    """

    build: Callable[[str], Made]
    sites: int
    model_type: str = "bert"
    attentions: tuple[str, ...] = ("sdpa", "eager")


def make(kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """The model in eval mode, every parameter moved off its initial value.

    Position biases start at zero and norms at one, so that a graph without them would agree.
    """
    torch.manual_seed(0)
    config._attn_implementation = attention
    if getattr(config, "backbone_config", None) is not None:  # convolutions have no SDPA
        config.backbone_config._attn_implementation = "eager"
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def image(size: int = IMAGE) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def tokens(length: int = 10) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length))


def padded(length: int = 10) -> Tensor:
    """(2, length) of ones, the second row padded at its end."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return mask


def text(model: nn.Module, **more: Tensor) -> ExportSpec:
    """A model of token ids and a padding mask, both with a dynamic batch and length."""
    inputs = {"input_ids": tokens(), "attention_mask": padded(), **more}
    return ExportSpec(model, inputs, {name: {0: BATCH, 1: TOKENS} for name in inputs})


def small(**changes: Any) -> Mapping[str, Any]:
    """Sizes by the names that most configurations share."""
    return {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        **changes,
    }
