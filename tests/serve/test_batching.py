"""Requests share runs, and each gets its own answer."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from attn_export import load
from tests.boundary import edit_manifest
from tests.serve.conftest import Array, Served, infer, start

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CLIENTS, EACH = 12, 12


def sentence(rng: np.random.Generator) -> dict[str, Array]:
    """One to three rows of one of two lengths, with a hole in each mask."""
    rows, length = int(rng.integers(1, 4)), int(rng.choice([7, 12]))
    mask = np.ones((rows, length), bool)
    mask[np.arange(rows), rng.integers(1, length, rows)] = False
    return {"tokens": rng.normal(size=(rows, length, 16)).astype(np.float32), "mask": mask}


def at_once(
    served: Served, model: str, make: Callable[[np.random.Generator], dict[str, Array]], output: str
) -> list[tuple[dict[str, Array], Array]]:
    """What clients at once sent, half of them over gRPC, and what each got."""
    begin = threading.Barrier(CLIENTS)

    def work(seed: int) -> list[tuple[dict[str, Array], Array]]:
        rng = np.random.default_rng(seed)
        with served.http() if seed % 2 else served.grpc() as client:
            begin.wait()
            sent = [make(rng) for _ in range(EACH)]
            return [(inputs, infer(client, model, inputs, output)) for inputs in sent]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [pair for pairs in pool.map(work, range(CLIENTS)) for pair in pairs]


def shared(served: Served, model: str) -> float:
    """Requests a run."""
    runs = served.metric("attn_export_run_requests_count", model_name=model)
    return served.metric("attn_export_run_requests_sum", model_name=model) / runs


@pytest.fixture(scope="module")
def batching(
    digits_bundle: Path, masked_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """`mixed` is `vit-digits` whose rows are said to mix, and whose input to be finite."""
    mixed = Path(shutil.copytree(digits_bundle, tmp_path_factory.mktemp("mixed") / "bundle"))
    edit_manifest(mixed, lambda manifest: manifest.update(rows_mix=["model"]))
    edit_manifest(mixed, lambda manifest: manifest["inputs"][0].update(finite=True))
    options = ["--max-batch-size", "16", "--max-delay", "20", "--threads", "1"]
    served = start(f"masked={masked_bundle}", f"mixed={mixed}", *options)
    yield served
    assert served.end() == 0
    assert not [line for line in served.log if "exception" in line]


def test_runs_are_shared_and_answers_are_not(batching: Served, masked_bundle: Path) -> None:
    with load(masked_bundle, "ort-cpu", threads=1) as session:
        (output,) = session.run(sentence(np.random.default_rng(0)))
        pairs = at_once(batching, "masked", sentence, output)
        assert len(pairs) == CLIENTS * EACH
        for inputs, answer in pairs:
            np.testing.assert_allclose(answer, session.run(inputs)[output], **CLOSE)
    assert shared(batching, "masked") > 1.5
    runs = batching.metric("attn_export_run_rows_count", model_name="masked")
    assert batching.metric("attn_export_run_rows_bucket", model_name="masked", le="16.0") == runs


def test_what_is_not_finite_stays_in_its_own_rows(batching: Served, masked_bundle: Path) -> None:
    def broken(rng: np.random.Generator) -> dict[str, Array]:
        inputs = sentence(rng)
        if rng.integers(2):
            tokens: Any = inputs["tokens"]
            tokens[0, 0, 0] = np.nan
        return inputs

    with load(masked_bundle, "ort-cpu", threads=1) as session:
        (output,) = session.run(sentence(np.random.default_rng(0)))
        pairs = at_once(batching, "masked", broken, output)
        for inputs, answer in pairs:
            np.testing.assert_allclose(answer, session.run(inputs)[output], **CLOSE)
    assert {bool(np.isnan(answer).any()) for _, answer in pairs} == {True, False}


def test_an_input_that_the_manifest_calls_finite(batching: Served) -> None:
    with (
        batching.grpc() as client,
        pytest.raises(InferenceServerException, match="input 'image' is not finite"),
    ):
        infer(client, "mixed", {"image": np.full((1, 1, 8, 8), np.nan, np.float32)}, "logits")


def test_rows_that_see_each_other_are_never_shared(batching: Served, digits_bundle: Path) -> None:
    with load(digits_bundle, "ort-cpu", threads=1) as session:
        for inputs, answer in at_once(batching, "mixed", image, "logits"):
            np.testing.assert_allclose(answer, session.run(inputs)["logits"], **CLOSE)
    assert shared(batching, "mixed") == 1


def image(rng: np.random.Generator) -> dict[str, Array]:
    return {"image": rng.normal(size=(1, 1, 8, 8)).astype(np.float32)}
