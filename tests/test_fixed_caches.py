"""What a manifest says of caches of a fixed capacity, and which inputs fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attn_export.errors import InputError
from attn_export.fixed_caches import FixedCaches, grown, without


def manifest(tokens: str | int = "tokens") -> dict[str, Any]:
    """A step with one cache of up to 8 positions, and a mask of the past that grows."""
    entry = {"component": "model", "dtype": "int64", "ranges": {}}
    return {
        "components": ["model"],
        "inputs": [
            {**entry, "name": "input_ids", "shape": ["batch", tokens]},
            {**entry, "name": "past_mask", "shape": ["batch", "past"], "ranges": {"past": [0, 7]}},
            {**entry, "name": "past.0", "shape": ["batch", 2, "capacity", 4],
             "ranges": {"batch": [1, 4], "capacity": [1, 8]}},
            {**entry, "name": "past_length", "shape": [1]},
        ],
        "outputs": [{**entry, "name": "present.0", "shape": ["batch", 2, "capacity", 4]}],
        "state": [
            {"output": "present_mask", "input": "past_mask", "axis": 1},
            {"output": "present.0", "input": "past.0", "axis": 2, "capacity": 8,
             "length": "past_length", "size": "past", "tokens": tokens},
        ],
    }  # fmt: skip


def caches(tokens: str | int = "tokens") -> FixedCaches:
    found = FixedCaches.of(manifest(tokens), "model")
    assert found is not None
    return found


def given(rows: int, new: int, size: int = 8, past: int = 0) -> dict[str, Any]:
    return {
        "input_ids": np.zeros((rows, new)), "past.0": np.zeros((rows, 2, size, 4)),
        "past_length": np.array([past]),
    }  # fmt: skip


def test_only_caches_with_a_capacity_count() -> None:
    assert caches() == FixedCaches({"past.0": "present.0"}, 2, 8, "past_length", "past",
                                   ("input_ids", 1))  # fmt: skip
    assert caches(1).tokens is None
    plain = {**manifest(), "state": manifest()["state"][:1]}
    assert FixedCaches.of(plain, "model") is None
    assert FixedCaches.of({**plain, "state": []}, "model") is None
    assert FixedCaches.of(manifest(), "prefill") is None


def test_a_manifest_looks_as_if_its_caches_grew() -> None:
    seen = grown(manifest())
    names = [entry["name"] for entry in seen["inputs"]]
    assert names == ["input_ids", "past_mask", "past.0"]
    assert seen["inputs"][2]["shape"] == ["batch", 2, "past", 4]
    assert seen["inputs"][2]["ranges"] == {"batch": [1, 4], "past": [0, 8]}
    assert seen["outputs"][0]["shape"] == ["batch", 2, "past + tokens", 4]
    assert grown(seen) == seen
    assert grown({"inputs": [], "outputs": []}) == {"inputs": [], "outputs": []}


def test_what_buffers_hold_can_be_left_out() -> None:
    rest = without(manifest())
    assert [entry["name"] for entry in rest["inputs"]] == ["input_ids", "past_mask"]
    assert rest["inputs"][1]["ranges"] == {}
    assert [row["input"] for row in rest["state"]] == ["past_mask"]


@pytest.mark.parametrize(("rows", "new", "past"), [(3, 8, 0), (1, 5, 3), (3, 1, 7), (1, 1, 0)])
def test_tokens_that_fit_are_counted(rows: int, new: int, past: int) -> None:
    inputs = given(rows, new, past=past)
    assert caches().room(past, inputs) == past + new
    caches().check(inputs)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (
            given(1, 3, past=6),
            "3 new after 6 cached tokens do not fit into a cache of 8; give 2",
        ),
        (given(1, 1, past=8), "1 new after 8 cached tokens do not fit into a cache of 8; start ag"),
        (given(2, 3, past=1), "2 rows bring 3 new tokens each after 1 cached ones; give them one"),
        (given(1, 1, 4, past=4), "5 tokens do not fit into buffers of 4 positions; give larger"),
        (given(1, 1, past=-1), "'past_length' is -1; give the number of cached tokens."),
    ],
    ids=["several", "full", "rows", "small", "negative"],
)
def test_tokens_that_do_not_fit_are_refused(inputs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as raised:
        caches().check(inputs)
    assert str(raised.value).startswith(sentence)
