"""Greedy generation over a bundle's components. Needs numpy alone.

The components before the step (an encoder) run once; the step runs once a token. Its inputs are the
token, `state` that its own outputs carry on, and whatever else the inputs and the outputs of the
components before it provide under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_export.parity.tolerance import Array

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
TOKEN = "input_ids"


def greedy(
    manifest: Mapping[str, Any], runs: Mapping[str, Run], inputs: Mapping[str, Array]
) -> tuple[NDArray[np.int64], list[Mapping[str, Array]]]:
    """The most likely token at each step until every row has ended.

    Args:
        manifest: a bundle's manifest, for its `components`, `inputs`, `state` and `generate`.
        runs: component -> function from inputs to outputs.
        inputs: of the components before the step.

    Returns tokens int64 (B, steps) without the first one, and every step's outputs. Rows that ended
    go on with the end token.
    """
    *before, step = manifest["components"]
    rules = manifest["generate"]
    known = dict(inputs)
    for component in before:
        known |= runs[component]({name: known[name] for name in names(manifest, component)})
    batch = next(iter(inputs.values())).shape[0]
    known |= _first_state(manifest, step, known, batch)
    token = np.full((batch, 1), rules["bos"], dtype=np.int64)
    ended = np.zeros(batch, dtype=bool)
    tokens, outputs = [], []
    for _ in range(rules["max_length"]):
        known[TOKEN] = token
        made = runs[step]({name: known[name] for name in names(manifest, step)})
        known |= {entry["input"]: made[entry["output"]] for entry in manifest["state"]}
        chosen = made["logits"][:, -1].argmax(-1).astype(np.int64)
        token = np.where(ended, rules["eos"], chosen)[:, None]
        tokens.append(token)
        outputs.append(made)
        ended |= token[:, 0] == rules["eos"]
        if ended.all():
            break
    return np.concatenate(tokens, axis=1), outputs


def names(manifest: Mapping[str, Any], component: str) -> list[str]:
    return [entry["name"] for entry in manifest["inputs"] if entry["component"] == component]


def _first_state(
    manifest: Mapping[str, Any], step: str, known: Mapping[str, Array], batch: int
) -> dict[str, Array]:
    """Caches start empty on the axis that grows; a state that an encoder returns starts as that."""
    entries = {e["name"]: e for e in manifest["inputs"] if e["component"] == step}
    first: dict[str, Array] = {}
    for state in manifest["state"]:
        entry = entries[state["input"]]
        if entry["name"] in known:
            continue
        shape: list[int] = [
            0 if axis == state["axis"] else batch if size == "batch" else int(size)
            for axis, size in enumerate(entry["shape"])
        ]
        first[entry["name"]] = np.zeros(shape, dtype=entry["dtype"])
    return first


def exact_match(tokens: Array, target: Array, eos: int) -> float:
    """Share of rows of `tokens` (B, steps) that equal `target` (B, length) up to the end token."""

    def cut(rows: Array) -> Sequence[list[int]]:
        whole = [list(map(int, row)) for row in rows]
        return [row[: row.index(eos)] if eos in row else row for row in whole]

    return float(np.mean([a == b for a, b in zip(cut(tokens), cut(target), strict=True)]))
