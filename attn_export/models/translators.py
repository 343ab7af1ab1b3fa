"""`translator` and `rnn-translator`: English to French, trained on the toy grammar."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from attn_export.models import toy_french as toy
from attn_export.models.named_caches import (
    cache_state,
    graph_names,
    named_caches,
    past_names,
    present_names,
)
from attn_export.models.rnn_translator import RNNTranslator, RNNTranslatorConfig
from attn_export.models.spec import Axis, Draw, ExportSpec, Metric
from attn_export.models.translator import Translator, TranslatorConfig

WEIGHTS = Path(__file__).parent / "weights"
TRANSFORMER = TranslatorConfig(len(toy.ENGLISH), len(toy.FRENCH))
RNN = RNNTranslatorConfig(len(toy.ENGLISH), len(toy.FRENCH))
GENERATE = {"bos": toy.BOS, "eos": toy.EOS, "max_length": toy.MAX_TARGET}

BATCH, SOURCE = Axis("batch", 1, 64), Axis("source", 1, 32)
PAST = Axis("past", 0, 32)
EXAMPLE = {"batch": 2, "source": 6, "past": 3}


def load_translator() -> Translator:
    """The trained Transformer, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        model = Translator(TRANSFORMER)
    model.load_state_dict(load_file(WEIGHTS / "translator.safetensors"))
    return model.eval()


def load_rnn_translator() -> RNNTranslator:
    """The trained GRU encoder-decoder, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        model = RNNTranslator(RNN)
    model.load_state_dict(load_file(WEIGHTS / "rnn_translator.safetensors"))
    return model.eval()


def held_out_sentences(count: int = 200) -> list[toy.Pair]:
    """Sentences with an adjective-noun pair that training never showed."""
    return toy.Grammar(torch.Generator().manual_seed(20_000)).pairs(count, held_out=True)


def _metric() -> Metric:
    """Scores the whole loop: inputs are the encoder's, the target is the decoder's tokens."""
    pairs = held_out_sentences()
    source_ids, source_mask = toy.encode([p.english for p in pairs], toy.ENGLISH)
    target, _ = toy.encode([p.french for p in pairs], toy.FRENCH)
    inputs = {"source_ids": source_ids, "source_mask": source_mask}
    return Metric(kind="exact-match", output="logits", inputs=inputs, target=target, drop=0.01)


def _source(
    generator: torch.Generator, sizes: Mapping[str, int], masked: bool
) -> dict[str, Tensor]:
    shape = (sizes["batch"], sizes["source"])
    mask = torch.rand(shape, generator=generator) > (0.3 if masked else -1.0)
    mask[:, 0] = True  # a sentence has at least one word
    ids = torch.randint(3, len(toy.ENGLISH), shape, generator=generator)
    return {"source_ids": ids, "source_mask": mask.long()}


def _encoder(model: torch.nn.Module, outputs: tuple[str, ...]) -> ExportSpec:
    return ExportSpec(
        module=model,
        inputs=_source(torch.Generator().manual_seed(0), EXAMPLE, False),
        dynamic={name: {0: BATCH, 1: SOURCE} for name in ("source_ids", "source_mask")},
        outputs=outputs,
        draw=_source,
        tokenizer={
            "file": WEIGHTS / "translator_tokenizer.json",
            "inputs": {"source_ids": "ids", "source_mask": "mask"},
            "max_length": SOURCE.max,
            "truncate": False,
        },
    )


def _decoder_draw(shapes: Mapping[str, tuple[int | str, ...]]) -> Draw:
    """Draws a token and a source mask, and normal values for `shapes` (axis names or sizes)."""

    def draw(
        generator: torch.Generator, sizes: Mapping[str, int], masked: bool
    ) -> dict[str, Tensor]:
        ids = torch.randint(3, len(toy.FRENCH), (sizes["batch"], 1), generator=generator)
        mask = _source(generator, sizes, masked)["source_mask"]
        drawn = {"input_ids": ids, "source_mask": mask}
        for name, shape in shapes.items():
            size = [sizes[axis] if isinstance(axis, str) else axis for axis in shape]
            drawn[name] = torch.randn(size, generator=generator)
        return drawn

    return draw


def translator() -> dict[str, ExportSpec]:
    """`encoder`: source ids and mask (B, S) to memory (B, S, D). `decoder`: one target token.

    The decoder returns `logits` (B, 1, V), `attention` (B, S) over the source tokens and the
    caches; at the first token the caches have length 0.
    """
    model, layers = load_translator(), TRANSFORMER.layers
    heads, head_size = TRANSFORMER.heads, TRANSFORMER.dim // TRANSFORMER.heads
    caches = dict.fromkeys(past_names(layers), ("batch", heads, "past", head_size))
    draw = _decoder_draw({"memory": ("batch", "source", TRANSFORMER.dim), **caches})
    names = ("input_ids", "source_mask", "memory")
    decoder = ExportSpec(
        module=named_caches(model.decoder, names, layers).eval(),
        inputs=draw(torch.Generator().manual_seed(1), EXAMPLE, False),
        dynamic={
            "input_ids": {0: BATCH},
            "source_mask": {0: BATCH, 1: SOURCE},
            "memory": {0: BATCH, 1: SOURCE},
            **{name: {0: BATCH, 2: PAST} for name in caches},
        },
        names=graph_names(layers),
        outputs=("logits", "attention", *present_names(layers)),
        draw=draw,
        metric=_metric(),
        state=cache_state(layers),
        generate=GENERATE,
        labels=toy.FRENCH,
        postprocess={"kind": "generate", "decode": "labels"},
    )
    return {"encoder": _encoder(model.encoder, ("memory",)), "decoder": decoder}


def rnn_translator() -> dict[str, ExportSpec]:
    """`encoder`: source ids and mask (B, S) to memory (B, S, 2*hidden) and hidden (B, hidden).
    `decoder`: one target token.

    The decoder returns `logits` (B, 1, V), `attention` (B, S) over the source tokens and
    `next_hidden`, which has one size at all steps and starts as the encoder's `hidden`.
    """
    model = load_rnn_translator()
    draw = _decoder_draw(
        {"hidden": ("batch", RNN.hidden), "memory": ("batch", "source", 2 * RNN.hidden)}
    )
    decoder = ExportSpec(
        module=model.decoder,
        inputs=draw(torch.Generator().manual_seed(1), EXAMPLE, False),
        dynamic={
            "input_ids": {0: BATCH},
            "source_mask": {0: BATCH, 1: SOURCE},
            "hidden": {0: BATCH},
            "memory": {0: BATCH, 1: SOURCE},
        },
        outputs=("logits", "attention", "next_hidden"),
        draw=draw,
        metric=_metric(),
        state=(("next_hidden", "hidden", 0),),
        generate=GENERATE,
        labels=toy.FRENCH,
        postprocess={"kind": "generate", "decode": "labels"},
    )
    return {"encoder": _encoder(model.encoder, ("memory", "hidden")), "decoder": decoder}
