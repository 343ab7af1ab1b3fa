"""The session's loop gives the tokens that PyTorch's own loop gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from attn_export import load
from attn_export.errors import InputError, UsageError
from attn_export.models.decoder_lm import DecoderLM, DecoderLMConfig
from attn_export.production.session import BundleSession


@pytest.fixture(scope="module")
def decoder(decoder_bundle: Path) -> Iterator[BundleSession]:
    with load(decoder_bundle) as session:
        yield session


@pytest.fixture(scope="module")
def pytorch() -> DecoderLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DecoderLM(DecoderLMConfig()).eval()


def prompts(rows: int, length: int, padding: int = 0) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(rows).integers(3, 512, (rows, length))
    mask = np.ones_like(ids)
    mask[1:, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(("rows", "length", "padding"), [(1, 7, 0), (3, 6, 2)])
def test_a_prompt_is_continued_as_pytorch_does(
    decoder: BundleSession, pytorch: DecoderLM, rows: int, length: int, padding: int
) -> None:
    given = prompts(rows, length, padding)
    expected = pytorch.generate(*map(torch.from_numpy, given.values()), steps=12).numpy()
    made = decoder.generate(given, max_length=12)
    assert (made.dtype, made.shape[0]) == (np.int64, rows)
    for row, whole in zip(made, expected, strict=True):
        ended = np.flatnonzero(whole == 2)
        until = int(ended[0]) + 1 if ended.size else 12
        assert row[:until].tolist() == whole[:until].tolist()


def test_tokens_come_one_step_at_a_time(decoder: BundleSession) -> None:
    given = prompts(2, 5)
    stream = decoder.stream(given, max_length=4)
    first = next(stream)
    assert first.shape == (2,)
    assert np.stack([first, *stream], axis=1).tolist() == decoder.generate(given, 4).tolist()


@pytest.mark.parametrize(
    ("given", "length", "sentence"),
    [
        (prompts(1, 250), 64,
         "64 tokens after 250 cached ones do not fit into a cache of 256; give max_length=8 or"),
        (prompts(1, 257), 2, "'tokens' is 257 in input 'input_ids', the model takes 1 to 256"),
        (prompts(1, 4), 0, "max_length is 0; give 1 or more."),
        (prompts(1, 4) | {"seed": np.zeros(1)}, 4, "no component has an input 'seed'; leave it"),
        ({"input_ids": prompts(1, 4)["input_ids"]}, 4,
         "input 'attention_mask' of 'prefill' is missing; give it beside input_ids."),
    ],
    ids=["cache", "prompt", "length", "unknown", "missing"],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused(
    decoder: BundleSession, given: dict[str, np.ndarray], length: int, sentence: str
) -> None:
    with pytest.raises(InputError) as raised:
        decoder.generate(given, length)
    assert str(raised.value).startswith(sentence)


def test_the_last_token_that_fits_is_made(decoder: BundleSession) -> None:
    assert decoder.generate(prompts(1, 250), 8).shape[1] <= 8


def test_a_bundle_without_a_loop_says_so(session: BundleSession, decoder_bundle: Path) -> None:
    with pytest.raises(UsageError, match="build has no loop to generate with; call run"):
        session.generate({"tokens": np.zeros((1, 3, 16), np.float32)})
    with (
        load(decoder_bundle, component="prefill") as alone,
        pytest.raises(UsageError, match="generation needs 'decode', which is not open; load with"),
    ):
        alone.generate(prompts(1, 4))
