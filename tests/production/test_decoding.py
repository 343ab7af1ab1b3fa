"""Steps with caches in place give what PyTorch gives with caches that grow by a copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export import export, load
from attn_export.errors import InputError, UsageError
from attn_export.models.attention.causal_cache import (
    CausalCacheAttention,
    CausalCacheConfig,
    visible_keys,
)
from attn_export.models.decoder_lm import EOS, DecoderLM, DecoderLMConfig, components, one_graph
from attn_export.models.named_caches import cache_state, graph_names, named_caches, present_names
from attn_export.models.spec import Axis, ExportSpec
from attn_export.production.session import BundleSession
from attn_export.source import Source

SMALL = DecoderLMConfig(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, hidden=48)
CAPACITY = 24
Arrays = dict[str, Any]


class Plain(nn.Module):
    """No mask and no rotary: positions are counted from the size of the cache; a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 32), nn.Embedding(CAPACITY, 32)
        self.attention = CausalCacheAttention(CausalCacheConfig(32, 4, 4))

    def forward(self, input_ids: Tensor, past: Any) -> tuple[Tensor, Any]:
        P, S = past[0][0].shape[2], input_ids.shape[1]
        x = self.words(input_ids) + self.places(torch.arange(P, P + S))
        ones = torch.ones(input_ids.shape[0], P + S, dtype=torch.bool)
        y, key, value = self.attention(x, visible_keys(ones, S), None, *past[0])
        return (x + y) @ self.words.weight.T, [(key, value)]


def plain() -> ExportSpec:
    torch.manual_seed(0)
    batch, tokens, past = Axis("batch", 1, 4), Axis("tokens", 1, CAPACITY), Axis("past", 1, 8)
    caches = {name: torch.randn(2, 4, 3, 8) for name in graph_names(1)}
    return ExportSpec(
        module=named_caches(Plain().eval(), ["input_ids"], 1),
        inputs={"input_ids": torch.randint(40, (2, 4)), **caches},
        dynamic={"input_ids": {0: batch, 1: tokens},
                 **{name: {0: batch, 2: past} for name in caches}},
        names=graph_names(1), outputs=("logits", *present_names(1)), state=cache_state(1),
        generate={"bos": 1, "eos": 2, "max_length": 8},
    )  # fmt: skip


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One graph, prefill and decode, and one without a mask."""
    folder = tmp_path_factory.mktemp("in-place")
    models: dict[str, dict[str, ExportSpec]] = {
        "one": {"model": one_graph(SMALL, CAPACITY)},
        "two": components(SMALL),
        "plain": {"model": plain()},
    }
    return {
        name: export(Source(name, name, specs), folder / name, cache_capacity=CAPACITY).path
        for name, specs in models.items()
    }


@pytest.fixture(scope="module")
def one(bundles: dict[str, Path]) -> Iterator[BundleSession]:
    with load(bundles["one"], threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DecoderLM(SMALL).eval()


def tokens(rows: int, length: int, padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids and their mask, the last row padded on the left."""
    ids = np.random.default_rng(rows + length).integers(3, 40, (rows, length))
    mask = np.ones_like(ids)
    mask[-1, :padding] = 0
    return ids, mask


def expected(model: DecoderLM, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The logits of all tokens at once."""
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(ids), torch.from_numpy(mask))[0].numpy()
    return found


class Walker:
    """Hands a mask that grows on; the caches are none of its business."""

    def __init__(self, session: BundleSession, rows: int, capacity: int | None = None) -> None:
        self.decoding = session.start(rows, capacity=capacity)
        self.mask = np.zeros((rows, 0), np.int64)

    def step(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        mask = np.ones_like(ids) if mask is None else mask
        given = {"input_ids": ids, "attention_mask": mask, "past_mask": self.mask}
        made = self.decoding.step(given)
        assert made.keys() == {"logits", "present_mask"}
        self.mask = made["present_mask"]
        return np.asarray(made["logits"])


@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (3, 2)])
def test_a_prompt_and_then_steps_are_one_full_pass(
    one: BundleSession, model: DecoderLM, rows: int, padding: int
) -> None:
    ids, mask = tokens(rows, 20, padding)
    walker = Walker(one, rows)
    parts = [walker.step(ids[:, :6], mask[:, :6])]
    walker.decoding._shared.spoil((float("nan"), 1e4))
    parts += [walker.step(ids[:, t : t + 1]) for t in range(6, 20)]
    assert (walker.decoding.length, walker.decoding.capacity) == (20, CAPACITY)
    seen = mask.astype(bool)  # queries that are padding see themselves alone
    whole = expected(model, ids, mask)
    np.testing.assert_allclose(np.concatenate(parts, 1)[seen], whole[seen], atol=2e-5)


def test_one_row_may_bring_a_second_prompt(one: BundleSession, model: DecoderLM) -> None:
    ids, mask = tokens(1, 12)
    walker = Walker(one, 1)
    parts = [walker.step(ids[:, low:high]) for low, high in ((0, 5), (5, 9), (9, 10), (10, 12))]
    np.testing.assert_allclose(np.concatenate(parts, 1), expected(model, ids, mask), atol=2e-5)


def test_a_step_writes_into_the_buffers_and_moves_nothing(one: BundleSession) -> None:
    walker = Walker(one, 2)
    walker.step(tokens(2, 5)[0])
    buffers = walker.decoding._shared._arrays
    before = {name: array.copy() for name, array in buffers.items()}
    walker.step(tokens(2, 1)[0])
    assert walker.decoding._shared._arrays is buffers
    for name, array in buffers.items():
        assert (array != before[name]).any(axis=(0, 1, 3)).tolist() == [
            position == 5 for position in range(CAPACITY)
        ]


def test_buffers_double_and_stop_at_the_capacity(one: BundleSession, model: DecoderLM) -> None:
    ids, mask = tokens(2, CAPACITY)
    walker, seen = Walker(one, 2, capacity=3), []
    parts = []
    for position in range(CAPACITY):
        parts.append(walker.step(ids[:, position : position + 1]))
        seen.append(walker.decoding.capacity)
    assert list(dict.fromkeys(seen)) == [3, 6, 12, 24]
    np.testing.assert_allclose(np.concatenate(parts, 1), expected(model, ids, mask), atol=2e-5)
    with pytest.raises(InputError) as raised:
        walker.decoding.step(
            {"input_ids": ids[:, :1], "attention_mask": mask[:, :1], "past_mask": mask[:, :24]}
        )
    assert str(raised.value) == (
        "'past' is 24 in input 'past_mask', the model takes 0 to 23; split the request, or export"
        " with a wider --dynamic range."
    )
    assert walker.decoding.length == CAPACITY


def test_tokens_can_be_taken_back(one: BundleSession, model: DecoderLM) -> None:
    """As a draft that was rejected."""
    ids, mask = tokens(1, 9)
    walker = Walker(one, 1)
    walker.step(ids[:, :6])
    walker.step(np.full((1, 2), 7))
    walker.decoding.rewind(6)
    walker.mask = walker.mask[:, :6]
    np.testing.assert_allclose(
        walker.step(ids[:, 6:]), expected(model, ids, mask)[:, 6:], atol=2e-5
    )
    with pytest.raises(InputError, match="10 tokens are to be kept of 9; give as many or fewer"):
        walker.decoding.rewind(10)


def test_threads_share_the_graph_and_not_the_caches(one: BundleSession) -> None:
    prompts = [tokens(1, length)[0] for length in (4, 9, 15)]

    def walk(ids: np.ndarray) -> list[np.ndarray]:
        walker = Walker(one, 1)
        return [walker.step(ids[:, t : t + 1]) for t in range(ids.shape[1])]

    alone = [walk(ids) for ids in prompts]
    found: dict[int, list[np.ndarray]] = {}
    threads = [
        threading.Thread(target=lambda i=i, ids=ids: found.__setitem__(i, walk(ids)))
        for i, ids in enumerate(prompts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, steps in enumerate(alone):
        assert all((a == b).all() for a, b in zip(steps, found[index], strict=True))


def test_steps_that_do_not_fit_leave_the_caches_alone(one: BundleSession) -> None:
    walker = Walker(one, 3)
    ids, mask = tokens(3, 4)
    walker.step(ids)
    for change, sentence in (
        ({"input_ids": ids, "attention_mask": mask},
         "3 rows bring 4 new tokens each after 4 cached ones; give them one by one, or one row"),
        ({"input_ids": ids[:1, :1], "attention_mask": mask[:1, :1], "past_mask": mask[:1]},
         "input 'input_ids' has 1 rows, the caches 3; give each step all rows, or start again."),
        ({"past_length": np.array([1])}, "the model has no input 'past_length'; its inputs are"),
    ):  # fmt: skip
        given = {"input_ids": ids[:, :1], "attention_mask": mask[:, :1], "past_mask": mask}
        with pytest.raises(InputError) as raised:
            walker.decoding.step({**given, **change})
        assert str(raised.value).startswith(sentence)
    assert walker.decoding.length == 4


def test_what_cannot_be_started_is_refused(one: BundleSession, lengths_bundle: Path) -> None:
    with pytest.raises(InputError, match="17 rows are asked for, the model takes 1 to 16"):
        one.start(17)
    with pytest.raises(InputError, match="25 positions are asked for, the caches take 1 to 24"):
        one.start(1, capacity=25)
    with (
        load(lengths_bundle, "ort-cpu") as other,
        pytest.raises(UsageError, match="no caches of a fixed capacity; export it with --cache-c"),
    ):
        other.start()


def test_a_closed_session_steps_no_more(bundles: dict[str, Path]) -> None:
    with load(bundles["plain"], threads=1) as session:
        decoding = session.start()
    with pytest.raises(UsageError, match="this session is closed; load the bundle again"):
        decoding.step({"input_ids": np.ones((1, 1), np.int64)})


def test_buffers_may_be_given_as_arrays_too(bundles: dict[str, Path]) -> None:
    """As servers of other languages do; numpy's outputs are copies then."""
    with load(bundles["plain"], threads=1) as session:
        ids = tokens(2, 6)[0]
        decoding = session.start(2)
        decoding.step({"input_ids": ids[:, :5]})
        caches = [np.full((2, 4, 9, 8), np.nan, np.float32) for _ in "kv"]
        for cache, filled in zip(caches, decoding._shared.filled().values(), strict=True):
            cache[:, :, :5] = filled
        given: Arrays = {
            "input_ids": ids[:, 5:], "past_length": np.array([5]),
            **{f"past_key_values.0.{n}": c for n, c in zip(("key", "value"), caches, strict=True)},
        }  # fmt: skip
        made = session.run(given)
        assert made["present.0.key"].shape == (2, 4, 9, 8)
        step = decoding.step({"input_ids": ids[:, 5:]})
        assert (made["logits"] == step["logits"]).all()
        for number, sentence in (
            (9, "10 tokens do not fit into buffers of 9"),
            (-1, "'past_length"),
        ):
            with pytest.raises(InputError, match=sentence):
                session.run({**given, "past_length": np.array([number])})


def test_a_model_without_a_mask_counts_from_its_length(bundles: dict[str, Path]) -> None:
    module = plain().module.model
    with load(bundles["plain"], threads=1, verify=True, warmup=True) as session:
        ids, decoding = tokens(3, 11)[0], session.start(3, capacity=2)
        parts = [decoding.step({"input_ids": ids[:, :4]})["logits"]]
        parts += [decoding.step({"input_ids": ids[:, t : t + 1]})["logits"] for t in range(4, 11)]
    empty = [(torch.zeros(3, 4, 0, 8), torch.zeros(3, 4, 0, 8))]
    with torch.no_grad():
        whole = module(torch.from_numpy(ids), empty)[0].numpy()
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-5)


def cut(row: np.ndarray) -> list[int]:
    found = row.tolist()
    return found[: found.index(EOS) + 1] if EOS in found else found


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (3, 2)])
def test_generation_is_pytorch_s(
    bundles: dict[str, Path], model: DecoderLM, name: str, rows: int, padding: int
) -> None:
    ids, mask = tokens(rows, 6, padding)
    truth = model.generate(torch.from_numpy(ids), torch.from_numpy(mask), 19).numpy()
    with load(bundles[name], threads=1, verify=True) as session:
        made = session.generate({"input_ids": ids, "attention_mask": mask}, 19)
    assert [cut(row) for row in made] == [cut(row) for row in truth]


def test_rows_that_end_early_wait_for_the_others(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end token is made the one that row 0 gives second."""
    ids, mask = tokens(3, 6)
    given = {"input_ids": ids, "attention_mask": mask}
    with load(bundles["one"], threads=1) as session:
        free = session.generate(given, 8)
        end = int(free[0, 1])
        monkeypatch.setitem(session._bundle.manifest["generate"], "eos", end)
        made = session.generate(given, 8)
    for row, whole in zip(made, free, strict=True):
        stop = whole.tolist().index(end) + 1 if end in whole else len(whole)
        assert row[:stop].tolist() == whole[:stop].tolist()[: len(row)]
        assert set(row[stop:].tolist()) <= {end}
    assert made[0].tolist() == [free[0, 0], *[end] * (made.shape[1] - 1)]


@pytest.mark.parametrize("name", ["one", "two"])
def test_what_would_not_fit_is_refused_before_the_first_step(
    bundles: dict[str, Path], name: str
) -> None:
    ids, mask = tokens(1, 20)
    given = {"input_ids": ids, "attention_mask": mask}
    with load(bundles[name], threads=1) as session:
        assert session.generate(given, 5).shape[1] <= 5
        for change, length, sentence in (
            ({}, 6, "6 tokens after 20 cached ones do not fit into a cache of 24; give max_leng"),
            ({}, 0, "max_length is 0; give 1 or more."),
            ({"attention_mask": mask[:, ::-1] * ([1] * 19 + [0])}, 3,
             "the prompt in row 0 is padded on the right; pad it on the left."),
        ):  # fmt: skip
            with pytest.raises(InputError) as raised:
                session.generate({**given, **change}, length)
            assert str(raised.value).startswith(sentence)


def test_a_prompt_alone_starts_a_model_without_masks(bundles: dict[str, Path]) -> None:
    ids = tokens(2, 4)[0]
    module = plain().module.model
    past = [(torch.zeros(2, 4, 0, 8), torch.zeros(2, 4, 0, 8))]
    token, truth = torch.from_numpy(ids), []
    with torch.no_grad():
        for _ in range(6):
            logits, past = module(token, past)
            token = logits[:, -1:].argmax(2)
            truth.append(token)
    with load(bundles["plain"], threads=1) as session:
        made = session.generate({"input_ids": ids}, 6)
    for row, whole in zip(made, torch.cat(truth, 1).numpy(), strict=True):
        assert cut(row) == cut(whole)[: len(cut(row))]
