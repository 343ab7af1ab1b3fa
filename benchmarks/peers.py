"""Each workload on this tool's best bundle and on every peer, on this machine's CPU in float32.

    python -m benchmarks.peers [--work FOLDER] [--seconds 4] [--only TEXT]... [--json FILE]

Peers: PyTorch eager and torch.compile; ONNX Runtime on PyTorch's own export at opsets 18 and 23;
onnxruntime.transformers' optimizer; onnxscript's optimize_for_ort; OpenVINO on the opset-18 export.
All answer the same stored cases first; one that is wrong is shown as wrong and has no time. Each
has a process of its own, and they take turns in rounds. A ratio is the median of this tool's over
that of the fastest peer that is right: below 1 is faster. What FOLDER holds from an earlier run is
not exported again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from rich.console import Console

from attn_export import bundle as bundles
from attn_export import export
from attn_export.bench.benchmark import Row, measure
from attn_export.bench.machine import machine
from attn_export.bench.process import WorkerProcess
from attn_export.bench.stats import ratio_interval, summarize_rounds
from attn_export.capability import TARGETS
from attn_export.cli.plain_table import plain_table
from attn_export.errors import AttnExportError, one_line
from attn_export.exporting.exporter import exporter_state, trace
from attn_export.runtimes.packages import versions
from attn_export.runtimes.threads import cores
from attn_export.sessions import as_grown, load
from attn_export.source import resolve
from attn_export.weights import write_graphs
from benchmarks.fusers import (
    DYNAMO_OPSET,
    attentions,
    dynamo,
    exporter,
    onnxruntime,
    onnxscript,
    quiet,
)
from benchmarks.workloads import WORKLOADS, Workload

FILE = Path(__file__).with_name("workloads.py")
OURS = {"attn-export on ort-cpu": "ort-cpu", "attn-export on openvino": "openvino"}
GRAPHS = {
    "ORT, opset 18": "ort-cpu",
    "ORT, opset 23": "ort-cpu",
    "ORT optimizer": "ort-cpu",
    "onnxscript": "ort-cpu",
    "OpenVINO": "openvino",
}
PEERS = ("eager", "torch.compile", *GRAPHS)
MODEL = "model.onnx"


def prepare(folder: Path, workload: Workload) -> dict[str, str]:
    """Bundles `ours` and one a peer below `folder`; what went wrong, by the peer's name."""
    origin = f"{FILE}:{workload.factory}"
    problems = fuse(folder / "graphs", origin, workload.family)
    if not (folder / "ours").exists():
        export(origin, folder / "ours", **{"targets": ("cpu", "openvino"), **workload.options})
    ours = bundles.read(folder / "ours")
    for peer in GRAPHS:
        if peer in problems:
            continue
        bundle = peer_bundle(folder / peer, ours, folder / "graphs" / peer / MODEL)
        try:
            with load(bundle, GRAPHS[peer]) as session:
                session.run(bundle.cases()[0].inputs)
        except AttnExportError as error:
            problems[peer] = f"does not run: {error.observed}"
    return problems


def fuse(folder: Path, origin: str, family: str) -> dict[str, str]:
    """The graph of each peer, once; what went wrong, by the peer's name."""
    ready = folder / "problems.json"
    if ready.exists():
        known: dict[str, str] = json.loads(ready.read_text())
        return known
    shutil.rmtree(folder, ignore_errors=True)
    (spec,) = resolve(origin).components.values()
    problems = {}
    with exporter_state(), tempfile.TemporaryDirectory() as scratch:
        traced = trace(replace(spec, module=spec.module.eval()))
        plain = dynamo(traced, Path(scratch), DYNAMO_OPSET)
        made: dict[str, Callable[[], Path]] = {
            "ORT, opset 18": lambda: plain,
            "ORT, opset 23": lambda: exporter(traced, Path(scratch), "")[0][0],
            "ORT optimizer": lambda: max(
                (path for path, _, _ in onnxruntime(traced, Path(scratch), family)), key=attentions
            ),
            "onnxscript": lambda: onnxscript(traced, Path(scratch), "")[0][0],
            "OpenVINO": lambda: plain,
        }
        for peer, make in made.items():
            (folder / peer).mkdir(parents=True)
            try:
                with quiet():
                    write_graphs(folder / peer, {MODEL: ir.load(make())}, bundles.WEIGHTS)
            except Exception as error:  # whatever a peer raises is its result
                problems[peer] = f"{type(error).__name__}: {one_line(error)}"
    ready.write_text(json.dumps(problems))
    return problems


def peer_bundle(folder: Path, ours: bundles.Bundle, graph: Path) -> bundles.Bundle:
    """A peer's graph with our cases, for both runtimes."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(graph.parent, folder, copy_function=os.link)
    os.link(ours.path / bundles.REFERENCE, folder / bundles.REFERENCE)
    manifest = {k: v for k, v in as_grown(ours).manifest.items() if k != "files"}
    state = [{k: row[k] for k in ("output", "input", "axis")} for row in manifest.get("state", ())]
    given = {**ours.targets()[0], "file": MODEL, "sites": []}
    targets = [
        {**given, "name": name, "runtime": target.runtime}
        for name, target in TARGETS.items()
        if target.runtime in OURS.values()
    ]
    bundles.seal(folder, {**manifest, "state": state, "targets": targets})
    return bundles.read(folder)


def compare(folder: Path, workload: Workload, seconds: float, threads: int) -> dict[str, Any]:
    """All who take part at one workload, in turns."""
    problems = prepare(folder, workload)
    origin = f"{FILE}:{workload.factory}"
    have = {target["runtime"] for target in bundles.read(folder / "ours").targets()}
    wanted = {name: ("ours", runtime) for name, runtime in OURS.items() if runtime in have}
    wanted |= {"eager": ("ours", "torch"), "torch.compile": ("ours", "torch-compile")}
    wanted |= {name: (name, runtime) for name, runtime in GRAPHS.items() if name not in problems}
    case = example_case(bundles.read(folder / "ours"), origin)
    rows: dict[str, Row] = {}
    with ExitStack() as stack:
        workers = {}
        for name, (where, runtime) in wanted.items():
            arguments = [str(folder / where), runtime, "model", str(threads), case, origin]
            workers[name] = stack.enter_context(WorkerProcess(runtime, arguments))
        rows = measure(workers, [workload.batch], seconds, lambda _: None)[workload.batch]
    return summary(rows, problems, workload)


def example_case(bundle: bundles.Bundle, origin: str) -> str:
    """The stored case of the workload's own inputs: others have other lengths."""
    (spec,) = resolve(origin).components.values()
    shapes = {spec.names.get(name, name): tuple(value.shape) for name, value in spec.inputs.items()}
    return next(
        case.name
        for case in bundle.cases()
        if {name: array.shape for name, array in case.inputs.items()} == shapes
    )


def summary(rows: Mapping[str, Row], problems: Mapping[str, str], workload: Workload) -> Any:
    """Medians, the best of each side, and their ratio."""
    sound = {name: row for name, row in rows.items() if row.sound}
    medians = {name: summarize_rounds(row.rounds).median for name, row in sound.items()}
    wrong = {name: f"wrong: {row.check['failures'][0]}" for name, row in rows.items()
             if name not in sound}  # fmt: skip
    ours = min((name for name in medians if name in OURS), key=lambda n: medians[n])
    best = min((name for name in medians if name not in OURS), key=lambda n: medians[n])
    ratio = medians[ours] / medians[best]
    low, high = ratio_interval(sound[ours].rounds, sound[best].rounds)
    timings = {name: row.timing(workload.batch or 0).to_json() for name, row in sound.items()}
    return {
        "less": workload.less, "ours": ours, "best_peer": best, "ratio": ratio,
        "low": min(low, ratio), "high": max(high, ratio), "medians_ms": medians,
        "problems": {**problems, **wrong},
        "timings": timings,
    }  # fmt: skip


def cell(found: Mapping[str, Any], name: str) -> str:
    if name in found["medians_ms"]:
        return f"{found['medians_ms'][name]:.2f}"
    problem = found["problems"].get(name)
    return "" if problem is None else "wrong" if problem.startswith("wrong") else "fails"


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="keep the exports there for the next run")
    parser.add_argument("--seconds", type=float, default=4.0, help="timed seconds, each at most")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--only", action="append", help="workloads whose name has this text")
    parser.add_argument("--prepare", action="store_true", help="export, and time nothing")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    chosen = {name: workload for name, workload in WORKLOADS.items()
              if not args.only or any(text in name for text in args.only)}  # fmt: skip
    here, console, found = machine(args.threads), Console(width=190), {}
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        for name, workload in chosen.items():
            folder = work / workload.factory
            if args.prepare:
                console.print(f"{name}: {prepare(folder, workload) or 'ready'}")
                continue
            found[name] = compare(folder, workload, args.seconds, args.threads)
            row = found[name]
            console.print(f"{name}: {row['ratio']:.3f} ({row['low']:.3f}..{row['high']:.3f})"
                          f" {row['ours']} over {row['best_peer']}")  # fmt: skip
            for peer, problem in row["problems"].items():
                console.print(f"  {peer}: {problem}")
            if args.json:  # a long run that is broken off has shown something
                shown = {"machine": here, "versions": versions(), "workloads": found}
                args.json.write_text(json.dumps(shown, indent=1))
    if found:
        show(console, here, found)


def show(console: Console, here: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    names = (*OURS, *PEERS)
    title = (
        f"milliseconds; {here['processor']}, {here['threads']} threads, load {here['load_average']}"
    )
    table = plain_table(title, "workload", "less work", "ratio", "95 %", *names, right=names)
    for name, row in found.items():
        table.add_row(
            name, row["less"], f"{row['ratio']:.3f}", f"{row['low']:.3f}..{row['high']:.3f}",
            *(cell(row, column) for column in names),
        )  # fmt: skip
    console.print(table)
    less = [row["ratio"] for row in found.values() if row["less"]]
    if less:
        mean = geometric_mean(less)
        console.print(
            f"where less work is legal: {mean:.3f} of the best peer's time, {1 / mean:.2f}x"
        )


if __name__ == "__main__":
    main()
