"""The models that have a name on the command line. Listing them imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_export.models.spec import ExportSpec


@dataclass(frozen=True)
class ZooEntry:
    """One row of `attn-export models`.

    Attributes:
        factory: "module:function" below `attn_export.models`; takes no arguments and returns an
            ExportSpec, or one for each component (encoder, decoder step) by its name.
        parameters: weights that are learned, counted over all components.
        tokens: sequence lengths that attention runs over, in words.
        kinds: kinds of attention inside, in the order in which they occur.
        trained: whether the package ships trained weights (else seeded random ones).
    """

    factory: str
    summary: str
    parameters: int
    tokens: str
    kinds: tuple[str, ...]
    trained: bool = False

    def build(self) -> ExportSpec | dict[str, ExportSpec]:
        module, function = self.factory.split(":")
        factory: Callable[[], ExportSpec | dict[str, ExportSpec]] = getattr(
            importlib.import_module(f"attn_export.models.{module}"), function
        )
        return factory()


ZOO: dict[str, ZooEntry] = {
    "vit": ZooEntry(
        factory="vit:vit",
        summary="Vision Transformer, the tiny size at 224 pixels",
        parameters=5_717_416,
        tokens="197",
        kinds=("self",),
    ),
    "vit-digits": ZooEntry(
        factory="vit_digits:vit_digits",
        summary="Vision Transformer trained on the UCI handwritten digits",
        parameters=302_154,
        tokens="17",
        kinds=("self",),
        trained=True,
    ),
    "senet": ZooEntry(
        factory="senet:senet",
        summary="SE-ResNet for small images, squeeze-and-excitation in each residual block",
        parameters=702_470,
        tokens="none: 32, 64 and 128 channels",
        kinds=("channel",),
    ),
    "translator": ZooEntry(
        factory="translators:translator",
        summary="Transformer encoder-decoder trained on a small English-French grammar",
        parameters=249_825,
        tokens="source 1 to 32, target 1 to 33",
        kinds=("self", "causal", "cross"),
        trained=True,
    ),
    "rnn-translator": ZooEntry(
        factory="translators:rnn_translator",
        summary="GRU encoder-decoder with additive attention, trained on the same grammar",
        parameters=267_793,
        tokens="source 1 to 32",
        kinds=("additive",),
        trained=True,
    ),
    "decoder-lm": ZooEntry(
        factory="decoder_lm:decoder_lm",
        summary="Llama-like decoder: KV cache, grouped queries, rotary embedding",
        parameters=500_352,
        tokens="1 to 256 new, 1 to 256 cached",
        kinds=("causal",),
    ),
    "decoder-lm-window": ZooEntry(
        factory="decoder_lm:decoder_lm_window",
        summary="The same with a window of 8 tokens",
        parameters=500_352,
        tokens="1 to 256 new, 1 to 256 cached",
        kinds=("causal", "window"),
    ),
    "decoder-lm-in-place": ZooEntry(
        factory="decoder_lm:decoder_lm_in_place",
        summary="Prefill and decode in one graph, caches in buffers that no step copies",
        parameters=500_352,
        tokens="1 to 256 new and cached",
        kinds=("causal",),
    ),
    "text-encoder": ZooEntry(
        factory="text_encoder:text_encoder",
        summary="BERT-like encoder with a padding mask and mean-pooled sentence embeddings",
        parameters=677_248,
        tokens="1 to 128",
        kinds=("self",),
    ),
    "cross-unet": ZooEntry(
        factory="cross_unet:cross_unet",
        summary="One text-conditioned U-Net stage of a latent diffusion model",
        parameters=462_912,
        tokens="16 to 4,096 pixels, 1 to 77 words",
        kinds=("self", "cross"),
    ),
    "detector": ZooEntry(
        factory="detector:detector",
        summary="YOLO26-style detector, 80 classes, attention on the stride-32 map only",
        parameters=2_531_900,
        tokens="16 to 1,600; 400 at 640x640",
        kinds=("self",),
    ),
    "detector-digits": ZooEntry(
        factory="detector_digits:detector_digits",
        summary="The same, smaller, trained to find handwritten digits on textured scenes",
        parameters=686_590,
        tokens="16 to 1,600; 25 at 160x160",
        kinds=("self",),
        trained=True,
    ),
    "detr": ZooEntry(
        factory="detr:detr",
        summary="DETR: encoder, and a decoder with object queries, on a small backbone",
        parameters=1_031_685,
        tokens="4 to 1,024 cells, 25 queries",
        kinds=("self", "cross"),
    ),
    "deformable-detr": ZooEntry(
        factory="deformable_detr:deformable_detr",
        summary="Encoder of Deformable DETR on three maps",
        parameters=571_472,
        tokens="84 to 21,504 cells, 12 points each",
        kinds=("deformable",),
    ),
    "swin": ZooEntry(
        factory="swin:swin",
        summary="Swin Transformer: shifted windows with relative position bias",
        parameters=535_190,
        tokens="16 in each window",
        kinds=("window",),
    ),
    "swin-v2": ZooEntry(
        factory="swin:swin_v2",
        summary="Swin Transformer V2: cosine attention, log-spaced continuous position bias",
        parameters=546_646,
        tokens="16 in each window",
        kinds=("window",),
    ),
}
