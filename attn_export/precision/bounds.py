"""Declared bounds, `NAME=VALUE`: how much worse a graph may be where no run of PyTorch judges it.

`top1`: share of rows whose largest entry is PyTorch's, at least VALUE. `cosine`: similarity of each
output, at least VALUE. `sqnr`: signal to noise of each output in dB, at least VALUE. `top1-drop`,
`map50-drop`, `exact-match-drop`: how much the held-out score may fall, at most VALUE. Numpy alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn_export.errors import UsageError
from attn_export.parity.compare import cosine
from attn_export.parity.tolerance import Array

DROP = "-drop"
LEAST = ("top1", "cosine", "sqnr")
Pair = tuple[Array, Array]  # the runtime's output, PyTorch's


@dataclass(frozen=True)
class Bound:
    """A declared bound, as the manifest has it."""

    name: str
    value: float

    @property
    def words(self) -> str:
        return f"{self.name} at {'most' if self.name.endswith(DROP) else 'least'} {self.value:g}"


@dataclass(frozen=True)
class Checked:
    """A bound and what was found."""

    bound: Bound
    found: float

    @property
    def passed(self) -> bool:
        if self.bound.name.endswith(DROP):
            return self.found <= self.bound.value + 1e-12
        return self.found >= self.bound.value - 1e-12

    @property
    def problem(self) -> str:
        if np.isnan(self.bound.value):
            return "nothing says how far off answers in this precision may be"
        return "" if self.passed else f"{self.bound.name} is {self.found:.6g}, {self.bound.words}"

    def to_json(self) -> dict[str, Any]:
        numbers = {"value": self.bound.value, "found": self.found}
        shown = {key: n if np.isfinite(n) else str(n) for key, n in numbers.items()}
        return {"name": self.bound.name, **shown, "passed": self.passed}


UNJUDGED = Checked(Bound("none", float("nan")), float("nan"))
"""What is found of a graph that neither PyTorch's own run nor a bound judges."""


def parse(text: str) -> Bound:
    """`top1-drop=0.01`.

    Raises:
        UsageError: no such bound, or no number that it could be.
    """
    name, equals, number = text.partition("=")
    name = name.strip().removesuffix(">").removesuffix("<").strip()
    known = [*LEAST, "top1-drop", "map50-drop", "exact-match-drop"]
    if name not in known:
        raise UsageError(f"there is no metric bound '{name}'", f"use {', '.join(known)}")
    if not equals or not re.fullmatch(r"\s*[-+]?[\d.]+(e[-+]?\d+)?\s*", number):
        raise UsageError(f"--metric-bound {text} has no number", "write NAME=VALUE")
    value = float(number)
    if name != "sqnr" and not 0 <= value <= 1:
        raise UsageError(f"--metric-bound {name} is {value:g}", "give a number from 0 to 1")
    return Bound(name, value)


def agreement(pairs: Sequence[Pair]) -> float:
    """Share of rows, over the last axis, whose largest entry is the same."""
    same = [a.argmax(-1) == b.argmax(-1) for a, b in pairs if b.ndim and b.shape[-1] > 1]
    return float(np.mean(np.concatenate([np.ravel(row) for row in same]))) if same else 1.0


def sqnr(a: Array, b: Array) -> float:
    """Signal to quantisation noise in dB; infinity for equal arrays."""
    reference = np.asarray(b, np.float64)
    noise = float(np.sum(np.square(np.asarray(a, np.float64) - reference)))
    signal = float(np.sum(np.square(reference)))
    if noise == 0:
        return float("inf")
    return float(10 * np.log10(signal / noise)) if signal else float("-inf")


def check(
    bounds: Sequence[Bound],
    pairs: Mapping[str, Sequence[Pair]],
    metric: Mapping[str, Any] | None,
    score: float | None,
) -> list[Checked]:
    """Judge; a score that was not taken counts as no score at all.

    Args:
        pairs: output -> (the runtime's, PyTorch's) of every stored case; floats only.
        metric: the manifest's `metric`, with PyTorch's own score.
        score: the runtime's.
    """
    flat = [pair for row in pairs.values() for pair in row]
    found = []
    for bound in bounds:
        if bound.name.endswith(DROP):
            lost = float("inf")
            if metric is not None and score is not None and f"{metric['kind']}{DROP}" == bound.name:
                lost = float(metric["reference"]) - score
            found.append(Checked(bound, lost))
        elif bound.name == "top1":
            scored = pairs.get(str(metric["output"]), flat) if metric else flat
            found.append(Checked(bound, agreement(scored)))
        else:
            measure = sqnr if bound.name == "sqnr" else _cosine
            values = [measure(a, b) for a, b in flat]
            found.append(Checked(bound, min(values, default=float("-inf"))))
    return found


def _cosine(a: Array, b: Array) -> float:
    value = cosine(np.asarray(a, np.float64), np.asarray(b, np.float64))
    return value if np.isfinite(value) else float("-inf")
