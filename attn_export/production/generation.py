"""Greedy generation with caches that stay where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import InputError
from attn_export.fixed_caches import CAPACITY, without
from attn_export.parity.generate import TOKEN, Run, steps
from attn_export.parity.tolerance import Array
from attn_export.production.decoding import Decoding
from attn_export.runtimes.base import Arrays


class Starts(Protocol):
    """What `in_place` needs of a session."""

    def start(self, rows: int = 1, component: str | None = None) -> Decoding: ...


def in_place(
    session: Starts,
    manifest: Mapping[str, Any],
    runs: Mapping[str, Run],
    inputs: Mapping[str, Array],
    max_length: int | None,
) -> Iterator[NDArray[np.int64]]:
    """The tokens of `parity.generate.steps`, the last component's caches in buffers.

    A component before it that returns the same caches (a prefill) has them copied into the buffers
    once; where there is none, the prompt goes through the step itself.

    Raises:
        InputError: as `steps`.
    """
    *before, last = manifest["components"]
    decoding = session.start(next(iter(inputs.values())).shape[0], last)
    outputs = {row["output"] for row in manifest["state"] if CAPACITY in row}
    most = manifest["generate"]["max_length"] if max_length is None else max_length

    def prefill(name: str) -> Run:
        def run(given: Mapping[str, Array]) -> Arrays:
            made = dict(runs[name](given))
            if outputs <= made.keys():
                decoding.fill(made)
            return {key: array for key, array in made.items() if key not in outputs}

        return run

    def step(given: Mapping[str, Array]) -> Arrays:
        if not asked:
            asked.append(given[TOKEN].shape[1])
            _check_room(decoding, asked[0], most)
        return decoding.step(given)

    asked: list[int] = []
    wrapped: dict[str, Run] = {name: prefill(name) for name in before}
    wrapped[last] = step
    made = steps(without(manifest), wrapped, inputs, max_length)
    return (found.tokens for found in made)


def _check_room(decoding: Decoding, prompt: int, length: int) -> None:
    """Refuse before the first step what would not fit; the last token made is not cached."""
    past = decoding.length
    room = decoding.limit - past - prompt + 1 + int(past > 0)
    if length > room:
        raise InputError(
            f"{length} tokens after {past or prompt} cached ones do not fit into a cache of"
            f" {decoding.limit}",
            f"give max_length={room} or a shorter prompt" if room > 0 else "give a shorter prompt",
        )
