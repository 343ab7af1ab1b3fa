"""Greedy generation over a bundle's components. Needs numpy alone.

The components before the step (an encoder, or a prefill) run once; the step runs once a token. Its
inputs are the token, `state` that outputs carry on, and whatever else the inputs and the outputs of
the components before it provide under the same name. Where one of those (a prefill) gives `logits`
already, the first token is its own; otherwise the step starts from the token `bos`. A model of one
component that takes several tokens has the prompt in its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import InputError
from attn_export.parity.tolerance import Array

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
TOKEN, LOGITS, MASK, POSITIONS = "input_ids", "logits", "attention_mask", "position_ids"


@dataclass(frozen=True)
class Step:
    """One token a row: `tokens` int64 (B,), and the outputs of the run that it came from."""

    tokens: NDArray[np.int64]
    outputs: Mapping[str, Array]


def greedy(
    manifest: Mapping[str, Any], runs: Mapping[str, Run], inputs: Mapping[str, Array]
) -> tuple[NDArray[np.int64], list[Mapping[str, Array]]]:
    """The most likely token at each step until every row has ended.

    Returns tokens int64 (B, steps) without `bos`, and every step's outputs; otherwise as `steps`.
    """
    made = list(steps(manifest, runs, inputs))
    return np.stack([step.tokens for step in made], axis=1), [step.outputs for step in made]


def steps(
    manifest: Mapping[str, Any],
    runs: Mapping[str, Run],
    inputs: Mapping[str, Array],
    max_length: int | None = None,
) -> Iterator[Step]:
    """The most likely token of each row, step after step, until every row has ended.

    Rows that ended go on with the end token.

    Args:
        manifest: a bundle's manifest, for its `components`, `inputs`, `state` and `generate`.
        runs: component -> function from inputs to outputs.
        inputs: of the components before the step, (B, ...) each; prompts are padded on the left.
        max_length: the most tokens; the manifest's where it is left out.

    Raises:
        InputError: an input is missing, a prompt is padded on the right, or the caches cannot take
            `max_length` tokens. Nothing of the step has run then.
    """
    *before, step = manifest["components"]
    rules, known = manifest["generate"], dict(inputs)
    for component in before:
        known |= runs[component](_take(manifest, component, known))
    batch = next(iter(inputs.values())).shape[0]
    prompt = known[TOKEN].shape[1] if TOKEN in known and _takes_prompts(manifest) else 0
    length = rules["max_length"] if max_length is None else max_length
    made = {name: known[name] for name in known.keys() - inputs.keys()} if LOGITS in known else {}
    if made or prompt:
        _refuse_right_padding(inputs)
    if made:
        known |= {s["input"]: made[s["output"]] for s in manifest["state"] if s["output"] in made}
    known |= _first_state(manifest, step, known, batch)
    _check_room(manifest, step, known, length, int(bool(made or prompt)), prompt)
    token = np.full(batch, rules["bos"], dtype=np.int64)
    ended = np.zeros(batch, dtype=bool)
    for _ in range(length):
        if not made:
            if not prompt:
                known[TOKEN] = token[:, None]
            made = dict(runs[step](_take(manifest, step, known)))
            known |= {entry["input"]: made[entry["output"]] for entry in manifest["state"]}
        token = np.where(ended, rules["eos"], made[LOGITS][:, -1].argmax(-1)).astype(np.int64)
        yield Step(token, made)
        if _takes_prompts(manifest):
            known |= _of_next(manifest, step, known)
        made, prompt = {}, 0
        ended |= token == rules["eos"]
        if ended.all():
            break


def _takes_prompts(manifest: Mapping[str, Any]) -> bool:
    """Whether the one component takes several tokens at once."""
    shapes = [e["shape"] for e in manifest["inputs"] if e["name"] == TOKEN]
    return len(manifest["components"]) == 1 and any(
        len(shape) == 2 and isinstance(shape[1], str) for shape in shapes
    )


def _of_next(
    manifest: Mapping[str, Any], step: str, known: Mapping[str, Array]
) -> dict[str, Array]:
    """What stands beside one more token: a mask (B, S) or (B, P + S) that keeps it, its position.

    Reads what stood beside the tokens before.
    """
    shapes = {e["name"]: e["shape"] for e in manifest["inputs"] if e["component"] == step}
    found: dict[str, Array] = {}
    if MASK in shapes and len(shapes[MASK]) == 2:
        ones = np.ones_like(known[MASK][:, :1])
        own = shapes[MASK][1] == shapes[TOKEN][1]
        found[MASK] = ones if own else np.concatenate([known[MASK], ones], axis=1)
    if POSITIONS in shapes and len(shapes[POSITIONS]) == 2:
        found[POSITIONS] = known[POSITIONS][:, -1:] + 1
    return found


def _take(
    manifest: Mapping[str, Any], component: str, known: Mapping[str, Array]
) -> dict[str, Array]:
    wanted = names(manifest, component)
    for name in wanted:
        if name not in known:
            raise InputError(
                f"input '{name}' of '{component}' is missing",
                f"give it beside {', '.join(known) or 'nothing'}",
            )
    return {name: known[name] for name in wanted}


def _refuse_right_padding(inputs: Mapping[str, Array]) -> None:
    """The next token is read at the last position, which must be one of the prompt's."""
    mask = inputs.get(MASK)
    if mask is not None and mask.ndim == 2 and not mask[:, -1].all():
        row = int(np.flatnonzero(mask[:, -1] == 0)[0])
        raise InputError(f"the prompt in row {row} is padded on the right", "pad it on the left")


def _check_room(
    manifest: Mapping[str, Any],
    step: str,
    known: Mapping[str, Array],
    length: int,
    first: int,
    prompt: int,
) -> None:
    """A cache is one longer at each run, inside of the graph's range; `first` tokens need none.

    Args:
        prompt: tokens that the first run adds to the cache.
    """
    if length < 1:
        raise InputError(f"max_length is {length}", "give 1 or more")
    entries = {e["name"]: e for e in manifest["inputs"] if e["component"] == step}
    made = {e["name"]: e["shape"] for e in manifest["outputs"] if e["component"] == step}
    for state in manifest["state"]:
        entry, axis = entries[state["input"]], state["axis"]
        size = entry["shape"][axis]
        if made[state["output"]][axis] == size or size not in entry.get("ranges", {}):
            continue
        start, most = known[entry["name"]].shape[axis] + prompt, entry["ranges"][size][1]
        room = most - start + 1 + first
        if length > room:
            raise InputError(
                f"{length} tokens after {start} cached ones do not fit into a cache of {most}",
                f"give max_length={room} or a shorter prompt" if room > 0
                else "give a shorter prompt",
            )  # fmt: skip


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
