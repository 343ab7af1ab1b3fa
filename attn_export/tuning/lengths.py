"""The lengths at which sites are measured, and from which one which op is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from attn_export import bundle as bundles
from attn_export.attention.sizes import evaluate
from attn_export.onnx_files.inputs import draw
from attn_export.parity.tolerance import Array
from attn_export.reference import Case
from attn_export.tuning.bases import binding
from attn_export.tuning.sites import Kind, SiteTimes

MOST = 4  # lengths
LONGEST = 4096  # tokens; a matrix of scores of more takes too long for a quick look


@dataclass(frozen=True)
class Length:
    """Inputs of the whole graph, and its symbolic sizes with them."""

    name: str
    sizes: Mapping[str, int]
    inputs: Mapping[str, Array]


def lengths(
    bundle: bundles.Bundle, model: ir.Model, cases: Sequence[Case], timed: Case
) -> list[Length]:
    """The timed case, the largest declared lengths, and those of other cases that differ.

    Args:
        cases: of the component.
        model: its canonical graph, for inputs of sizes that no case has.
    """
    found = [Length(timed.name, binding(bundle, timed), timed.inputs)]
    ranges = _ranges(bundle, timed.component)
    if ranges:
        largest = {
            name: size if name not in ranges else min(ranges[name], LONGEST)
            for name, size in found[0].sizes.items()
        }
        stored = next((c for c in cases if _lengths(binding(bundle, c)) == _lengths(largest)), None)
        inputs = stored.inputs if stored else draw(model, largest, False, 0)
        sizes = binding(bundle, stored) if stored else largest
        told = " ".join(f"{name}={size}" for name, size in sizes.items())
        found.append(Length(told, sizes, inputs))
    found += [Length(case.name, binding(bundle, case), case.inputs) for case in cases]
    unique: list[Length] = []
    for length in found:
        if all(_lengths(length.sizes) != _lengths(other.sizes) for other in unique):
            unique.append(length)
    return unique[:MOST]


def _ranges(bundle: bundles.Bundle, component: str) -> dict[str, int]:
    """Largest declared sizes, but for the batch."""
    return {
        name: int(high)
        for row in bundle.manifest["inputs"]
        if row["component"] == component
        for name, (_, high) in row.get("ranges", {}).items()
        if name != "batch"
    }


def _lengths(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name != "batch"}


def tokens_at(kind: Kind, sizes: Mapping[str, int]) -> tuple[int, int]:
    """S and T of a kind of sites. Raises ValueError where they are not known."""
    S, T = (evaluate(size, sizes) for size in kind.site.tokens)
    return S, T


def best_of(times: Sequence[SiteTimes]) -> str:
    """The op that is best over the lengths: its times over the fastest's, on geometric average.

    Ops within noise of the fastest at every length count as fast there.
    """
    shared = [op for op in times[0].ms if all(op in row.ms for row in times)]

    def slowness(op: str) -> float:
        logs = []
        for row in times:
            fastest = min(found.median for found in row.ms.values())
            logs.append(0.0 if op in row.as_fast else math.log(row.ms[op].median / fastest))
        return sum(logs)

    return min(shared or [times[0].best], key=slowness)


def buckets(times: Sequence[SiteTimes]) -> list[dict[str, Any]]:
    """[{"tokens": [FROM, TO], "op"}]: at which lengths each op was the best, shortest first."""
    found: list[dict[str, Any]] = []
    for row in sorted(times, key=lambda row: row.tokens[1]):
        keys = row.tokens[1]
        if found and found[-1]["op"] in row.as_fast:
            found[-1]["tokens"][1] = keys
        else:
            found.append({"tokens": [keys, keys], "op": row.best})
    return found
