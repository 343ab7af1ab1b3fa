"""Attention over text, exported by torch.onnx and run by ONNX Runtime at many sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from attn_export.models import cross_unet, decoder_lm, text_encoder, translators
from attn_export.models import toy_french as toy
from attn_export.models.attention.additive import AdditiveAttention
from attn_export.models.attention.causal_cache import (
    CausalCacheAttention,
    CausalCacheConfig,
    token_positions,
    visible_keys,
)
from attn_export.models.attention.rotary import rotary_angles
from attn_export.models.spec import Axis, ExportSpec
from attn_export.models.zoo import ZOO
from tests.models import exporting


class CachedStep(nn.Module):
    """CausalCacheAttention with its mask and angles made from tensors alone."""

    def __init__(self, config: CausalCacheConfig, window: int | None) -> None:
        super().__init__()
        self.attention = CausalCacheAttention(config)
        self.window = window

    def forward(
        self, x: Tensor, mask: Tensor, past_mask: Tensor, past_key: Tensor, past_value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask, S = torch.cat([past_mask, mask], dim=1), x.shape[1]
        angles = rotary_angles(token_positions(mask, S).unsqueeze(1), 8, 10000.0, x.dtype)
        visible = visible_keys(mask, S, self.window)
        step: tuple[Tensor, Tensor, Tensor] = self.attention(
            x, visible, angles, past_key, past_value
        )
        return step


BATCH, TOKENS, PAST = Axis("batch", 1, 8), Axis("tokens", 1, 64), Axis("past", 0, 64)


def bools(g: torch.Generator, shape: tuple[int, ...], masked: bool) -> Tensor:
    return torch.rand(shape, generator=g) > (0.4 if masked else -1.0)


def cached_step(heads: int, kv_heads: int, window: int | None, fused: bool) -> ExportSpec:
    torch.manual_seed(0)
    config = CausalCacheConfig(8 * heads, heads, kv_heads, fused=fused)

    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> dict[str, Tensor]:
        B, S, P = sizes["batch"], sizes["tokens"], sizes["past"]
        return {
            "x": torch.randn(B, S, config.dim, generator=g),
            "mask": bools(g, (B, S), masked),
            "past_mask": bools(g, (B, P), masked),
            "past_key": torch.randn(B, kv_heads, P, 8, generator=g),
            "past_value": torch.randn(B, kv_heads, P, 8, generator=g),
        }

    example = {"batch": 2, "tokens": 4, "past": 3}
    return ExportSpec(
        module=CachedStep(config, window).eval(),
        inputs=draw(torch.Generator().manual_seed(0), example, True),
        dynamic={
            "x": {0: BATCH, 1: TOKENS},
            "mask": {0: BATCH, 1: TOKENS},
            "past_mask": {0: BATCH, 1: PAST},
            "past_key": {0: BATCH, 2: PAST},
            "past_value": {0: BATCH, 2: PAST},
        },
        outputs=("y", "present_key", "present_value"),
        draw=draw,
    )


def additive() -> ExportSpec:
    torch.manual_seed(0)

    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> dict[str, Tensor]:
        B, T = sizes["batch"], sizes["tokens"]
        return {
            "query": torch.randn(B, 6, generator=g),
            "keys": torch.randn(B, T, 5, generator=g),
            "mask": bools(g, (B, T), masked),
        }

    return ExportSpec(
        module=AdditiveAttention(6, 5, 7).eval(),
        inputs=draw(torch.Generator().manual_seed(0), {"batch": 2, "tokens": 4}, True),
        dynamic={
            "query": {0: BATCH},
            "keys": {0: BATCH, 1: TOKENS},
            "mask": {0: BATCH, 1: TOKENS},
        },
        outputs=("context", "weights"),
        draw=draw,
    )


SPECS: dict[str, Callable[[], ExportSpec]] = {
    "additive": additive,
    "cached-step": lambda: cached_step(4, 4, None, True),
    "cached-step-grouped": lambda: cached_step(4, 2, None, True),
    "cached-step-grouped-by-hand": lambda: cached_step(4, 2, None, False),
    "cached-step-window": lambda: cached_step(4, 2, 3, True),
    "translator-encoder": lambda: translators.translator()["encoder"],
    "translator-decoder": lambda: translators.translator()["decoder"],
    "rnn-translator-encoder": lambda: translators.rnn_translator()["encoder"],
    "rnn-translator-decoder": lambda: translators.rnn_translator()["decoder"],
    "decoder-lm-prefill": lambda: decoder_lm.decoder_lm()["prefill"],
    "decoder-lm-decode": lambda: decoder_lm.decoder_lm()["decode"],
    "decoder-lm-window-prefill": lambda: decoder_lm.decoder_lm_window()["prefill"],
    "decoder-lm-window-decode": lambda: decoder_lm.decoder_lm_window()["decode"],
    "decoder-lm-in-place": decoder_lm.decoder_lm_in_place,
    "text-encoder": text_encoder.text_encoder,
    "cross-unet": cross_unet.cross_unet,
}


@cache
def session(name: str, folder: Path) -> tuple[ExportSpec, ort.InferenceSession]:
    spec = SPECS[name]()
    return spec, exporting.session(spec, folder / f"{name}.onnx")


def run(model: ort.InferenceSession, inputs: Mapping[str, Tensor]) -> list[np.ndarray]:
    # An input that the graph does not need is not in it.
    names = {i.name for i in model.get_inputs()}
    return model.run(None, {k: v.numpy() for k, v in inputs.items() if k in names})


SIZES = [
    {"batch": 1, "tokens": 1, "past": 1, "source": 1, "words": 1, "height": 4, "width": 5},
    {"batch": 2, "tokens": 9, "past": 5, "source": 9, "words": 12, "height": 7, "width": 4},
    {"batch": 3, "tokens": 33, "past": 17, "source": 14, "words": 5, "height": 12, "width": 16},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.mark.parametrize("masked", [False, True], ids=["all-allowed", "holes"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"batch{sizes['batch']}")
@pytest.mark.parametrize("name", SPECS)
def test_the_exported_graph_gives_pytorchs_values(
    name: str, sizes: dict[str, int], masked: bool, folder: Path
) -> None:
    spec, model = session(name, folder)
    assert spec.draw is not None
    inputs = spec.draw(torch.Generator().manual_seed(7), sizes, masked)
    assert list(inputs) == list(spec.inputs)
    with torch.no_grad():
        expected = spec.module(**inputs)
    expected = (expected,) if isinstance(expected, Tensor) else expected
    outputs = run(model, inputs)
    assert len(spec.outputs) == len(outputs) == len(expected)
    for output, right in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output, right.numpy(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", SPECS)
def test_declared_axes_are_symbolic_in_the_graph(name: str, folder: Path) -> None:
    spec, model = session(name, folder)
    for graph_input in model.get_inputs():
        fixed = [i for i, size in enumerate(graph_input.shape) if isinstance(size, int)]
        assert not set(fixed) & set(spec.dynamic.get(graph_input.name, {}))


@pytest.mark.parametrize("name", SPECS)
def test_a_row_of_a_batch_equals_its_own_run(name: str, folder: Path) -> None:
    spec, model = session(name, folder)
    assert spec.draw is not None
    inputs = spec.draw(torch.Generator().manual_seed(3), SIZES[2], True)
    together = run(model, inputs)
    for i in range(3):
        alone = run(model, {key: value[i : i + 1] for key, value in inputs.items()})
        with torch.no_grad():
            eager = spec.module(**{key: value[i : i + 1] for key, value in inputs.items()})
        eager = (eager,) if isinstance(eager, Tensor) else eager
        for batch, row, right in zip(together, alone, eager, strict=True):
            np.testing.assert_allclose(batch[i : i + 1], row, rtol=1e-4, atol=2e-5)
            np.testing.assert_allclose(batch[i : i + 1], right.numpy(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", SPECS)
def test_double_precision_stays_near_single(name: str) -> None:
    spec = SPECS[name]()
    with torch.no_grad():
        single = spec.module(**spec.inputs)
        truth = spec.module.double()(
            **{k: v.double() if v.is_floating_point() else v for k, v in spec.inputs.items()}
        )
    single, truth = ((y,) if isinstance(y, Tensor) else y for y in (single, truth))
    for output, right in zip(single, truth, strict=True):
        if output.is_floating_point():
            assert right.dtype == torch.float64
        torch.testing.assert_close(output, right, rtol=1e-4, atol=2e-5, check_dtype=False)


def test_caches_may_be_empty(folder: Path) -> None:
    sizes = {"batch": 2, "tokens": 3, "past": 0, "source": 4}
    for name in ("cached-step", "cached-step-grouped", "cached-step-window", "translator-decoder"):
        spec, model = session(name, folder)
        assert spec.draw is not None
        inputs = spec.draw(torch.Generator().manual_seed(5), sizes, False)
        with torch.no_grad():
            expected = spec.module(**inputs)
        for output, right in zip(run(model, inputs), expected, strict=True):
            np.testing.assert_allclose(output, right.numpy(), rtol=1e-4, atol=2e-5)


def greedy(name: str, source: Mapping[str, Tensor], folder: Path) -> tuple[Tensor, np.ndarray]:
    """The loop around the exported graphs: token ids (B, L) and attention (B, L, T)."""
    _, encoder = session(f"{name}-encoder", folder)
    spec, decoder = session(f"{name}-decoder", folder)
    encoder_outputs = SPECS[f"{name}-encoder"]().outputs
    feed = dict(zip(encoder_outputs, map(torch.from_numpy, run(encoder, source)), strict=True))
    feed["source_mask"] = source["source_mask"]
    for _, name_in_graph, axis in spec.state:
        into = spec.parameter(name_in_graph)
        shape = list(spec.inputs[into].shape)
        shape[0], shape[axis] = len(source["source_ids"]), 0
        feed.setdefault(into, torch.zeros(shape))
    feed["input_ids"] = torch.full_like(source["source_ids"][:, :1], spec.generate["bos"])
    tokens, attention = [], []
    for _ in range(spec.generate["max_length"]):
        outputs = dict(zip(spec.outputs, map(torch.from_numpy, run(decoder, feed)), strict=True))
        feed |= {spec.parameter(into): outputs[out] for out, into, _ in spec.state}
        feed["input_ids"] = outputs["logits"].argmax(dim=2)
        tokens.append(feed["input_ids"])
        attention.append(outputs["attention"].numpy())
    return torch.cat(tokens, dim=1), np.stack(attention, axis=1)


@pytest.mark.parametrize("name", ["translator", "rnn-translator"])
def test_the_exported_loop_translates_the_held_out_sentences(name: str, folder: Path) -> None:
    metric = SPECS[f"{name}-decoder"]().metric
    assert metric is not None
    tokens, _ = greedy(name, metric.inputs, folder)
    right = toy.decode(metric.target, toy.FRENCH)
    answers = toy.decode(tokens, toy.FRENCH)
    assert sum(a == b for a, b in zip(answers, right, strict=True)) >= 198


@pytest.mark.parametrize("name", ["translator", "rnn-translator"])
def test_noir_attends_most_to_black_in_the_exported_graph(name: str, folder: Path) -> None:
    ids, mask = toy.encode(["the black cat"], toy.ENGLISH)
    tokens, attention = greedy(name, {"source_ids": ids, "source_mask": mask}, folder)
    assert toy.decode(tokens, toy.FRENCH) == ["le chat noir"]
    assert attention[0, 2].argmax() == 1  # the, black, cat, <eos>


@pytest.mark.parametrize(
    "name",
    [
        "translator",
        "rnn-translator",
        "decoder-lm",
        "decoder-lm-window",
        "decoder-lm-in-place",
        "text-encoder",
        "cross-unet",
    ],
)
def test_the_zoo_states_the_number_of_parameters(name: str) -> None:
    built = ZOO[name].build()
    specs = built.values() if isinstance(built, dict) else [built]
    # Components share weights, which count once.
    sizes = {id(p): p.numel() for spec in specs for p in spec.module.parameters()}
    assert sum(sizes.values()) == ZOO[name].parameters
