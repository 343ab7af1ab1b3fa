"""One model through every tool: python -m benchmarks.coverage_worker FILE NAME TARGETS FOLDER

FOLDER/result.json holds what is known so far, and under "running" the tool that is at work. Tools
that are in it already are left out.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attn_export.attention.count import count
from attn_export.attention.lowering import lower
from attn_export.capability import TARGET_RUNTIMES
from attn_export.errors import AttnExportError, one_line
from attn_export.exporting.exporter import Graph, convert, exporter_state, finish, trace
from attn_export.parity.cases import build_cases
from attn_export.parity.caveats import CLEAR
from attn_export.parity.drawing import sizes_of
from attn_export.parity.tolerance import Array
from attn_export.reference import Case
from attn_export.runtimes import ort_cpu
from attn_export.source import resolve
from benchmarks.fusers import PEERS, attentions, quiet

OURS = "attn-export"


def main(file: str, name: str, targets: str, folder: Path) -> None:
    result = folder / "result.json"
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}

    def note(running: str | None) -> None:
        result.write_text(json.dumps({**found, **({"running": running} if running else {})}))

    note(OURS if OURS not in found else next((t for t in PEERS if t not in found), None))
    source = resolve(f"{file}:{name}")
    (spec,) = source.components.values()
    with exporter_state():
        start = time.perf_counter()
        traced = trace(replace(spec, module=spec.module.eval()))
        graph = finish(convert(traced.program), traced)
        export_s = time.perf_counter() - start
    total = len(count(graph.model))
    cases, _ = build_cases("model", graph.spec, {}, 0)
    if OURS not in found:
        found[OURS] = ours(graph, targets.split(","), cases, folder) | {"export_s": export_s}
    types: Mapping[str, str] = runpy.run_path(file).get("MODEL_TYPES", {})
    for tool, peer in PEERS.items():
        if tool in found:
            continue
        note(tool)
        try:
            with quiet(), exporter_state():
                made = peer(traced, folder, types.get(name, "bert"))
                tried = [(attentions(path), path, plain, label) for path, plain, label in made]
            fused, path, plain, label = max(tried, key=lambda t: t[0])
            found[tool] = {"fused": fused, "total": total, "from": label, **check(path, cases)}
            if found[tool]["wrong"] and plain != path and check(plain, cases)["wrong"]:
                found[tool]["wrong"] = f"export {found[tool]['wrong']}"  # not the fusion's doing
        except Exception as error:  # whatever a peer raises is its result
            found[tool] = {"problem": f"{type(error).__name__}: {one_line(error)}"}
    note(None)


def ours(
    graph: Graph, targets: Sequence[str], cases: Sequence[Case], folder: Path
) -> dict[str, Any]:
    """The account of the first target, and the ops of each."""
    rows: dict[str, Any] = {}
    for target in targets:
        model = graph.model.clone()
        start = time.perf_counter()
        account = lower(model, TARGET_RUNTIMES[target], sizes_of(graph.spec)).to_json()
        seconds = time.perf_counter() - start
        path = folder / f"ours.{target}.onnx"
        ir.save(model, path)
        sites = account["sites"]
        rows[target] = {
            "total": account["total"],
            "found": account["recognised"],
            "fused": account["lowered"],
            "proved": sum(site["proved"] == "run" for site in sites),
            "ops": Counter(site["lowering"] for site in sites if site["lowering"]),
            "reasons": sorted({s["reason"] for s in sites if s["status"] == "refused"}),
            "other": len(account["other"]),
            "lower_s": seconds,
        }
        # Only the CPU's graph is known to run on it.
        checked = check(path, cases) if target == "cpu" else {"wrong": "", "max_error": None}
        rows[target].update(checked)
    return {**rows[targets[0]], "targets": rows}


def check(path: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """The largest error over all cases, and the first that no rounding explains."""
    worst, wrong = 0.0, ""
    try:
        with ort_cpu.load(path) as session:
            taken = {spec.name for spec in session.inputs}
            for case in cases:
                answers = session.run({n: a for n, a in case.inputs.items() if n in taken})
                for name, expected in case.outputs.items():
                    error = difference(answers.get(name), expected)
                    worst = max(worst, error)
                    if error > CLEAR * max(case.allowed[name].values()) and not wrong:
                        wrong = f"wrong: {error:.2g} off in {name} at {case.name}"
    except AttnExportError as error:
        return {"max_error": None, "wrong": f"does not run: {error.observed}"}
    return {"max_error": worst, "wrong": wrong}


def difference(actual: Array | None, expected: Array) -> float:
    """Largest absolute difference; infinity for another shape, and for NaN against a number."""
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if (np.isnan(a) != np.isnan(b)).any():
        return float("inf")
    with np.errstate(invalid="ignore"):  # infinity less infinity
        return float(np.nanmax(np.where(a == b, 0.0, np.abs(a - b)), initial=0.0))


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
