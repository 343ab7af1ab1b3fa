"""Caches of a fixed capacity: what a manifest says of them, and inputs that fit. Numpy alone.

A graph with such caches takes buffers (B, K, C, H) whose first positions are filled, as many as its
length input says, and writes the keys and values of S new tokens behind them. Where an output is
given the very buffer of its input, nothing is copied. What lies in the other positions is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import InputError

LENGTH, CAPACITY = "past_length", "capacity"
Manifest = Mapping[str, Any]
Inputs = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class FixedCaches:
    """The caches of one component that have a fixed capacity.

    Attributes:
        outputs: input -> the output that continues it.
        axis: that of the positions.
        capacity: the most positions.
        length: the input, int64 (1,), that says how many of them are filled.
        size: what the axis is called in a graph whose caches grow.
        tokens: the input and axis that new tokens are counted on; None where each step takes one.
    """

    outputs: Mapping[str, str]
    axis: int
    capacity: int
    length: str
    size: str
    tokens: tuple[str, int] | None

    @classmethod
    def of(cls, manifest: Manifest, component: str) -> Self | None:
        """Those of a component; None where it has none."""
        shapes = {e["name"]: e["shape"] for e in manifest["inputs"] if e["component"] == component}
        rows = [
            row for row in manifest.get("state", ()) if CAPACITY in row and row["input"] in shapes
        ]
        if not rows:
            return None
        first = rows[0]
        counted = next(
            (
                (name, shape.index(first["tokens"]))
                for name, shape in shapes.items()
                if first["tokens"] in shape and isinstance(first["tokens"], str)
            ),
            None,
        )
        outputs = {row["input"]: row["output"] for row in rows}
        return cls(outputs, first["axis"], first[CAPACITY], first["length"], first["size"], counted)

    def new(self, inputs: Inputs) -> int:
        """S, the number of new tokens."""
        return 1 if self.tokens is None else inputs[self.tokens[0]].shape[self.tokens[1]]

    def room(self, past: int, inputs: Inputs) -> int:
        """P + S, for which a buffer must have room.

        Raises:
            InputError: more than the capacity; or several new tokens for several rows behind a
                past, which GroupQueryAttention does not take.
        """
        new, name = self.new(inputs), next(iter(inputs)) if self.tokens is None else self.tokens[0]
        rows = inputs[name].shape[0]
        if past + new > self.capacity:
            left = max(self.capacity - past, 0)
            raise InputError(
                f"{new} new after {past} cached tokens do not fit into a cache of {self.capacity}",
                f"give {left} at most, or export with a larger --cache-capacity"
                if left
                else "start again, or export with a larger --cache-capacity",
            )
        if past and new > 1 and rows > 1:
            raise InputError(
                f"{rows} rows bring {new} new tokens each after {past} cached ones",
                "give them one by one, or one row alone",
            )
        return past + new

    def check(self, inputs: Inputs) -> None:
        """Raise InputError unless the buffers have room for the inputs' length and new tokens."""
        past = int(inputs[self.length][0])
        size = inputs[next(iter(self.outputs))].shape[self.axis]
        if past < 0:
            raise InputError(f"'{self.length}' is {past}", "give the number of cached tokens")
        wanted = self.room(past, {n: a for n, a in inputs.items() if n != self.length})
        if wanted > size:
            raise InputError(
                f"{wanted} tokens do not fit into buffers of {size} positions",
                "give larger ones",
            )
        for name, array in inputs.items():
            if name in self.outputs and array.shape[self.axis] != size:
                raise InputError(f"'{name}' has another capacity", "give all caches the same")


def without(manifest: Manifest) -> dict[str, Any]:
    """The manifest without what buffers hold, and without bounds of their length."""
    fixed = [row for row in manifest.get("state", ()) if CAPACITY in row]
    held = {name for row in fixed for name in (row["input"], row["length"])}
    sizes = {row["size"] for row in fixed}

    def unbounded(entry: Mapping[str, Any]) -> dict[str, Any]:
        ranges = entry.get("ranges", {})
        return {**entry, "ranges": {n: r for n, r in ranges.items() if n not in sizes}}

    return {
        **manifest,
        "state": [row for row in manifest.get("state", ()) if CAPACITY not in row],
        "inputs": [unbounded(e) for e in manifest["inputs"] if e["name"] not in held],
    }


def grown(manifest: Manifest) -> dict[str, Any]:
    """The manifest as if the caches grew, which is how cases are stored and PyTorch is called."""
    state = list(manifest.get("state", ()))
    fixed = {(row["input"], row["output"]): row for row in state if CAPACITY in row}
    if not fixed:
        return dict(manifest)
    sizes = {name: row["size"] for pair, row in fixed.items() for name in pair}
    added = {name: f"{row['size']} + {row['tokens']}" for (_, name), row in fixed.items()}
    bounds = {row["size"]: [0, row[CAPACITY]] for row in fixed.values()}
    lengths = {row["length"] for row in fixed.values()}

    def renamed(entry: Mapping[str, Any]) -> dict[str, Any]:
        name = entry["name"]
        if name not in sizes or CAPACITY not in entry["shape"]:
            return dict(entry)
        size = added.get(name, sizes[name])
        shape = [size if axis == CAPACITY else axis for axis in entry["shape"]]
        found = {**entry, "shape": shape}
        if "ranges" in entry:
            kept = {key: value for key, value in entry["ranges"].items() if key != CAPACITY}
            found["ranges"] = kept | {sizes[name]: bounds[sizes[name]]}
        return found

    return {
        **manifest,
        "inputs": [renamed(e) for e in manifest["inputs"] if e["name"] not in lengths],
        "outputs": [renamed(e) for e in manifest["outputs"]],
    }
