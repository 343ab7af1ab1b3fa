"""Latencies in a bundle's manifest: `measured` of each target that was timed.

    {"median_ms", "p90_ms", "p99_ms", "runs", "case", "machine", "versions"}

`run` writes them; `load(..., runtime="auto")` orders the runtimes by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_export import bundle as bundles
from attn_export.bench.result import Benchmark


def record(bundle: bundles.Bundle, benchmark: Benchmark) -> bundles.Bundle:
    """Write what was timed into the manifest's targets of the component that was timed."""
    found = benchmark.to_json()
    component = next(c.component for c in bundle.cases() if c.name == benchmark.case)
    shared = {"case": benchmark.case, "machine": found["machine"], "versions": found["versions"]}
    keys = ("median_ms", "p90_ms", "p99_ms", "runs")

    def entry(target: dict[str, Any]) -> dict[str, Any]:
        timing = found["runtimes"].get(target["runtime"])
        if target["component"] != component or timing is None or timing["median_ms"] is None:
            return target
        if target["file"] != bundle.target_for([target["runtime"]], component)["file"]:
            return target  # of another precision
        return target | {"measured": {key: timing[key] for key in keys} | shared}

    return bundles.update(bundle, targets=[entry(target) for target in bundle.targets()])


def medians(bundle: bundles.Bundle, components: Sequence[str]) -> dict[str, float]:
    """Runtime -> the sum of its medians in milliseconds, over the components that all share.

    A runtime without any measurement is left out.
    """
    found: dict[str, dict[str, float]] = {}
    for target in bundle.targets():
        milliseconds = _median(target)
        if target["component"] in components and milliseconds is not None:
            found.setdefault(target["runtime"], {})[target["component"]] = milliseconds
    shared = set(components).intersection(*found.values())
    return {name: sum(row[c] for c in shared) for name, row in found.items() if shared}


def processor(bundle: bundles.Bundle, runtime: str) -> str:
    """Where a runtime was measured, empty where that is not told."""
    for target in bundle.targets():
        if target["runtime"] == runtime and _median(target) is not None:
            return str(target["measured"].get("machine", {}).get("processor", ""))
    return ""


def _median(target: dict[str, Any]) -> float | None:
    measured = target.get("measured")
    milliseconds = measured.get("median_ms") if isinstance(measured, dict) else None
    return float(milliseconds) if isinstance(milliseconds, (int, float)) else None
