"""Decoders with their caches as named tensors, the way that people export them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from attn_export.models.named_caches import Past, cache_state, graph_names, named_caches, past_names
from attn_export.models.spec import Axis, ExportSpec
from tests.zoo.entry import BATCH, tokens

NEW, PAST, SOURCE = Axis("new", 1, 16), Axis("past", 2, 32), Axis("source", 2, 32)


def as_cache(past: Past) -> DynamicCache:
    return DynamicCache([(key, value) for key, value in past])


def as_past(cache: DynamicCache) -> Past:
    return [(layer.keys, layer.values) for layer in cache.layers]


class CausalStep(nn.Module):
    """Logits (B, S, V) and the grown caches."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, past: Past) -> tuple[Tensor, Past]:
        result = self.model(input_ids, cache=as_cache(past), use_cache=True)
        return result.logits, as_past(result.cache)


class DecoderStep(nn.Module):
    """Hidden states (B, S, D) of a decoder that attends to an encoder's (B, T, D) as well."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, encoder: Tensor, past: Past) -> tuple[Tensor, Past]:
        caches = EncoderDecoderCache(as_cache(past), DynamicCache())
        result = self.decoder(
            input_ids=input_ids,
            encoder_hidden_states=encoder,
            cache=caches,
            use_cache=True,
        )
        own = result.cache.self_attention_cache
        return result.last_hidden_state, as_past(own)


def caches(layers: int, heads: int, size: int, length: int = 7) -> dict[str, Tensor]:
    return {name: torch.randn(2, heads, length, size) for name in past_names(layers)}


def cached_step(model: PreTrainedModel, *, layers: int, heads: int, size: int) -> ExportSpec:
    inputs = {"input_ids": tokens(3), **caches(layers, heads, size)}
    dynamic = {name: {0: BATCH, 2: PAST} for name in past_names(layers)}
    return _spec(CausalStep(model), inputs, {"input_ids": {0: BATCH, 1: NEW}, **dynamic}, layers)


def decoder_step(
    model: PreTrainedModel, decoder: nn.Module, *, layers: int, heads: int, size: int, width: int
) -> ExportSpec:
    inputs = {
        "input_ids": tokens(3),
        "encoder": torch.randn(2, 9, width),
        **caches(layers, heads, size),
    }
    dynamic = {
        "input_ids": {0: BATCH, 1: NEW},
        "encoder": {0: BATCH, 1: SOURCE},
        **{name: {0: BATCH, 2: PAST} for name in past_names(layers)},
    }
    return _spec(DecoderStep(decoder), inputs, dynamic, layers)


def _spec(
    step: nn.Module, inputs: dict[str, Tensor], dynamic: dict[str, dict[int, Axis]], layers: int
) -> ExportSpec:
    names = [name for name in inputs if name not in past_names(layers)]
    first = "logits" if isinstance(step, CausalStep) else "hidden"
    present = tuple(output for output, _, _ in cache_state(layers))
    return ExportSpec(
        named_caches(step, names, layers).eval(),
        inputs,
        dynamic,
        outputs=(first, *present),
        state=cache_state(layers),
        names=graph_names(layers),
    )
