"""The loop of generation, with steps whose answers are counted by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from attn_export.errors import InputError
from attn_export.parity.generate import greedy, steps
from attn_export.parity.tolerance import Array

VOCABULARY, EOS = 8, 7


def logits(tokens: Array) -> Array:
    """The next token is the last one and one more."""
    return np.eye(VOCABULARY, dtype=np.float32)[(tokens + 1) % VOCABULARY]


def entry(component: str, name: str, *shape: int | str, dtype: str = "int64") -> dict[str, Any]:
    ranges = {"past": [0, 6]} if "past" in shape else {}
    return {"component": component, "name": name, "shape": list(shape), "dtype": dtype,
            "ranges": ranges}  # fmt: skip


def manifest(*before: str) -> dict[str, Any]:
    """A step whose cache holds every token that it saw, after components that see a prompt."""
    inputs = [entry(name, "input_ids", "batch", "tokens") for name in before]
    inputs += [entry(name, "attention_mask", "batch", "tokens") for name in before]
    return {
        "components": [*before, "decode"],
        "inputs": [*inputs, entry("decode", "input_ids", "batch", 1),
                   entry("decode", "past_seen", "batch", "past")],
        "outputs": [entry("decode", "seen", "batch", "past + 1")],
        "state": [{"output": "seen", "input": "past_seen", "axis": 1}],
        "generate": {"bos": 0, "eos": EOS, "max_length": 4},
    }  # fmt: skip


def decode(inputs: Mapping[str, Array]) -> dict[str, Array]:
    seen = np.concatenate([inputs["past_seen"], inputs["input_ids"]], axis=1)
    return {"logits": logits(inputs["input_ids"]), "seen": seen}


def prefill(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {"logits": logits(inputs["input_ids"]), "seen": inputs["input_ids"]}


RUNS = {"prefill": prefill, "decode": decode}


def prompt(*rows: list[int]) -> dict[str, Array]:
    ids = np.array(rows, dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_without_a_prefill_the_first_token_follows_bos() -> None:
    tokens, outputs = greedy(manifest(), RUNS, {"anything": np.zeros((2, 1))})
    assert tokens.tolist() == [[1, 2, 3, 4]] * 2
    assert outputs[-1]["seen"].tolist() == [[0, 1, 2, 3]] * 2


def test_after_a_prefill_the_first_token_follows_the_prompt_and_its_cache() -> None:
    tokens, outputs = greedy(manifest("prefill"), RUNS, prompt([3, 1], [0, 2]))
    assert tokens.tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert outputs[-1]["seen"].tolist() == [[3, 1, 2, 3, 4], [0, 2, 3, 4, 5]]


def test_a_row_that_ended_stays_ended_and_all_ended_rows_stop() -> None:
    tokens, _ = greedy(manifest("prefill"), RUNS, prompt([5], [4]))
    assert tokens.tolist() == [[6, EOS, EOS], [5, 6, EOS]]


def test_tokens_come_one_step_at_a_time() -> None:
    made = steps(manifest("prefill"), RUNS, prompt([1]), max_length=2)
    assert [step.tokens.tolist() for step in made] == [[2], [3]]


@pytest.mark.parametrize(("before", "most"), [((), 7), (("prefill",), 6)])
def test_no_more_tokens_than_the_cache_takes(before: tuple[str, ...], most: int) -> None:
    """A cache of 0 to 6: seven runs from empty; one prefill token and five runs after two."""
    rules = {"bos": 1, "eos": -1, "max_length": most}
    described, given = {**manifest(*before), "generate": rules}, prompt([3, 4])
    assert greedy(described, RUNS, given)[0].shape == (1, most)
    with pytest.raises(InputError, match=f"give max_length={most} or a shorter prompt"):
        list(steps(described, RUNS, given, most + 1))


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_below_one_is_refused(length: int) -> None:
    with pytest.raises(InputError, match=f"max_length is {length}; give 1 or more."):
        list(steps(manifest(), RUNS, prompt([1]), length))


def test_a_prompt_padded_on_the_right_is_refused() -> None:
    given = prompt([1, 2], [3, 0])
    given["attention_mask"][1, 1] = 0
    with pytest.raises(InputError, match="the prompt in row 1 is padded on the right; pad it on"):
        list(steps(manifest("prefill"), RUNS, given))


def test_a_missing_input_is_named_with_its_component() -> None:
    with pytest.raises(InputError, match="input 'attention_mask' of 'prefill' is missing"):
        list(steps(manifest("prefill"), RUNS, {"input_ids": np.zeros((1, 2), np.int64)}))


def whole(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """One graph for prompts and steps, which sees what stands beside each token."""
    seen = np.concatenate([inputs["past_seen"], inputs["input_ids"]], axis=1)
    assert inputs["attention_mask"].shape == inputs["input_ids"].shape
    assert inputs["position_ids"][0, -1] == seen.shape[1] - 1
    return {"logits": logits(inputs["input_ids"]), "seen": seen}


def test_one_graph_takes_the_prompt_and_then_token_by_token() -> None:
    described = manifest()
    described["inputs"] = [
        *(entry("decode", name, "batch", "tokens")
          for name in ("input_ids", "attention_mask", "position_ids")),
        entry("decode", "past_seen", "batch", "past"),
    ]  # fmt: skip
    given = {**prompt([3, 1], [0, 2]), "position_ids": np.array([[0, 1], [0, 1]])}
    tokens, outputs = greedy(described, {"decode": whole}, given)
    assert tokens.tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert outputs[-1]["seen"].tolist() == [[3, 1, 2, 3, 4], [0, 2, 3, 4, 5]]
    with pytest.raises(InputError, match="give max_length=6 or a shorter prompt"):
        list(steps(described, {"decode": whole}, given, 7))


def test_a_mask_over_past_and_new_tokens_grows_with_them() -> None:
    described = manifest()
    described["inputs"] = [
        entry("decode", "input_ids", "batch", "tokens"),
        entry("decode", "attention_mask", "batch", "total"),
        entry("decode", "past_seen", "batch", "past"),
    ]
    masks = []

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        masks.append(inputs["attention_mask"].tolist())
        return decode(inputs)

    given = {**prompt([0, 1]), "attention_mask": np.array([[0, 1]])}
    assert greedy(described, {"decode": run}, given)[0].tolist() == [[2, 3, 4, 5]]
    assert masks == [[[0, 1]], [[0, 1, 1]], [[0, 1, 1, 1]], [[0, 1, 1, 1, 1]]]
