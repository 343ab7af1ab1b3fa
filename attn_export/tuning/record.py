"""What was chosen, written into the bundle: in one step, once the whole of it was verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attn_export import bundle as bundles
from attn_export.errors import CheckFailed
from attn_export.parity.result import Verification
from attn_export.runtimes.packages import runtime_version
from attn_export.tuning.result import Tuned
from attn_export.tuning.stage import link
from attn_export.tuning.together import Kept
from attn_export.verifying.verification import verify
from attn_export.weights import write_graphs

Progress = Callable[[str], None]
KEPT_OF_SITES = ("lowering", "status", "reason", "code", "proved", "blocked_rows")
MEASURED = ("median_ms", "p90_ms", "p99_ms", "runs")


def publish(
    bundle: bundles.Bundle, result: Tuned, asked: Sequence[str], progress: Progress
) -> bool:
    """Replace the bundle by one with the graphs and settings that were chosen.

    A target that the bundle did not have is added where it is the fastest, or was asked for.

    Returns:
        whether a graph was replaced or added.

    Raises:
        CheckFailed: a tuned target differs from PyTorch; the bundle stays as it was.
        FileError: it could not be written.
    """
    fastest = {one.component: one.runtime for one in result.chosen}
    kept = [
        one
        for one in result.kept()
        if not one.found.new
        or one.found.runtime in asked
        or fastest[one.found.component] == one.found.runtime
    ]
    graphs = {_file(one): one.variant.model for one in kept if _is_new(one)}
    targets = _targets(bundle, kept, result)
    manifest: dict[str, Any] = {
        **bundle.manifest,
        "targets": targets,
        "tuned": {one.component: {"runtime": one.runtime, "why": one.why} for one in result.chosen},
    }
    del manifest["files"]
    with bundles.write(bundle.path, overwrite=True) as stage:
        progress("writing the bundle")
        _write(stage, bundle, graphs)
        bundles.seal(stage, manifest)
        made = bundles.read(stage)
        progress("verifying the bundle")
        names = list(dict.fromkeys(one.found.runtime for one in kept))
        verification = verify(made, names, allow_fallback=True)
        if not verification.passed:
            worst = next(r for r in verification.runtimes.values() if not r.passed)
            raise CheckFailed(
                f"what was tuned for {worst.runtime} differs from PyTorch, {worst.failures[0]}",
                "report this model; the bundle is as it was",
            )
        _report(made, verification, result)
    return bool(graphs)


def _file(kept: Kept) -> str:
    if kept.found.new:
        return f"{kept.found.component}.{kept.found.target['name']}.onnx"
    return str(kept.found.target["file"])


def _is_new(kept: Kept) -> bool:
    """Whether its graph is another than the one that lies in the bundle."""
    tuned_before = isinstance(kept.found.target.get("tuned"), dict)
    return kept.found.new or tuned_before or not _same_graph(kept)


def _same_graph(kept: Kept) -> bool:
    return kept.variant.model is kept.found.contest.plain.model


def _write(stage: Path, bundle: bundles.Bundle, graphs: Mapping[str, ir.Model]) -> None:
    """All files: the weights anew where a graph changes, since all graphs share them."""
    files = bundle.manifest["files"]
    others = {str(target["file"]) for target in bundle.targets()} - graphs.keys()
    rewritten = {*graphs, *others, bundles.WEIGHTS} if graphs else set()
    for name in files:
        if name not in rewritten:
            link(bundle.path / name, stage / name)
    if graphs:
        kept = {name: ir.load(bundle.path / name) for name in sorted(others)}
        write_graphs(stage, {**kept, **graphs}, bundles.WEIGHTS)


def _targets(bundle: bundles.Bundle, kept: Sequence[Kept], result: Tuned) -> list[dict[str, Any]]:
    by_target = {_id(one.found.target): one for one in kept if not one.found.new}
    rows = []
    for target in bundle.targets():
        one = by_target.get(_id(target))
        rows.append(target if one is None else _tuned(target, one, result))
    for one in kept:
        if one.found.new:
            number, assumed = runtime_version(one.found.runtime)
            own = {
                "runtime": one.found.runtime, "runtime_version": number,
                "assumed_version": assumed, "checked": "run", "file": _file(one),
            }  # fmt: skip
            base = {k: v for k, v in one.found.target.items() if k not in ("measured", "tuned")}
            rows.append(_tuned({**base, **own}, one, result))
    return rows


def _id(target: Mapping[str, Any]) -> tuple[str, str]:
    return str(target["name"]), str(target["component"])


def _tuned(target: Mapping[str, Any], kept: Kept, result: Tuned) -> dict[str, Any]:
    entry = result.entry(kept)
    row = {**target, "tuned": entry}
    if not _same_graph(kept) or kept.found.new:
        row |= _account(target, kept.variant.account, entry["why"])
    if kept.figures.get("median_ms") is not None:
        measured = {key: kept.figures[key] for key in MEASURED}
        shared = {key: entry[key] for key in ("case", "machine", "versions")}
        row["measured"] = measured | shared
    return row


def _account(target: Mapping[str, Any], account: Mapping[str, Any], why: str) -> dict[str, Any]:
    """The sites as they are now. What the bundle knew of them from PyTorch's export is kept: from
    the graph alone a mask may look otherwise."""
    old = {site["name"]: site for site in target["sites"]}
    sites = []
    for site in account["sites"]:
        now = {key: site.get(key) for key in KEPT_OF_SITES}
        if now["status"] == "decomposed-by-choice":
            now["reason"] = f"measured by tune: {why}"
        sites.append({**(old.get(site["name"]) or site), **now})
    if {site["name"] for site in sites} != old.keys():
        return {**account, "work": target.get("work", [])}
    lowered = sum(site["status"] == "lowered" for site in sites)
    refused = sum(site["status"] == "refused" for site in sites)
    return {"sites": sites, "lowered": lowered, "refused": refused}


def _report(made: bundles.Bundle, verification: Verification, result: Tuned) -> None:
    """The report tells what the graphs are, so it is written anew where that is possible."""
    if bundles.REPORT not in made.manifest["files"]:
        return
    if find_spec("jinja2") is None:
        result.notes.append(
            f"{bundles.REPORT} is that of the export, since jinja2 is not installed here"
        )
        return
    from attn_export.report.html import render

    bundles.add_file(made, bundles.REPORT, render(made.manifest, verification, None))
