"""ONNX Runtime's CPU settings: latency, CPU time and memory of each, in a process of its own.

    python benchmarks/cpu_settings.py [SOURCE ...] [--seconds 3] [--rounds 3] [--pause-ms 5]

Threads from 1 to the cores that the container grants; spinning, arena and memory patterns switched
off one at a time. Requests come back to back, and with a pause between them as a server has.
Rounds are interleaved; shown is each setting's best round, since others only ever add time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from attn_export import bundle as bundles
from attn_export.bench.machine import machine
from attn_export.bench.worker import peak_rss_mb
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.ort import Settings
from attn_export.runtimes.threads import cores

MODELS = ("vit-digits", f"{Path(__file__).with_name('vit.py')}:vit_tiny")


@dataclass(frozen=True)
class Row:
    """One setting. `sessions` are open at once and take turns, as components of a bundle do."""

    label: str
    threads: int
    settings: Settings
    sessions: int = 1


def rows() -> list[Row]:
    most = cores()
    found = [Row(f"{n} threads", n, Settings()) for n in range(1, most + 1)]
    return [
        *found,
        Row("no spinning", most, Settings(spinning=False)),
        Row("no arena", most, Settings(arena=False)),
        Row("no patterns", most, Settings(patterns=False)),
        Row("2 sessions", most, Settings(), 2),
        Row("2 sessions, no spinning", most, Settings(spinning=False), 2),
    ]


def measure(folder: Path, row: Row, seconds: float, pause: float) -> dict[str, float]:
    """Medians of one call, and the CPU time of all threads for each call."""
    bundle = bundles.read(folder)
    case = max(bundle.cases(), key=lambda c: sum(a.size for a in c.inputs.values()))
    path = bundle.model_path(bundle.target_for([ort_cpu.NAME], case.component))
    sessions = [ort_cpu.load(path, row.threads, settings=row.settings) for _ in range(row.sessions)]
    for session in sessions * 5:
        session.run(case.inputs)
    wall: list[float] = []
    cpu, until = time.process_time(), time.perf_counter() + seconds
    while time.perf_counter() < until:
        for session in sessions:
            begun = time.perf_counter()
            session.run(case.inputs)
            wall.append(time.perf_counter() - begun)
            if pause:
                time.sleep(pause)
    used = time.process_time() - cpu
    return {
        "median_ms": float(np.median(wall)) * 1e3,
        "p90_ms": float(np.percentile(wall, 90)) * 1e3,
        "cpu_ms": used / len(wall) * 1e3,
        "peak_rss_mb": peak_rss_mb(),
    }


def in_a_process(folder: Path, index: int, seconds: float, pause: float) -> dict[str, float]:
    command = [
        sys.executable,
        __file__,
        "--worker",
        str(folder),
        str(index),
        str(seconds),
        str(pause),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def table(model: str, pause: float, best: dict[int, dict[str, float]]) -> Table:
    title = f"{model}, {f'{pause * 1e3:g} ms between requests' if pause else 'back to back'}"
    made = Table("setting", "median ms", "p90 ms", "CPU ms a call", "peak MB", title=title)
    for index, row in enumerate(rows()):
        found = best[index]
        made.add_row(row.label, *(f"{found[key]:.3g}" for key in ("median_ms", "p90_ms", "cpu_ms")),
                     f"{found['peak_rss_mb']:.0f}")  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round of each setting")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause-ms", type=float, default=5.0)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    from attn_export import export  # workers have no use for torch

    console, kept = Console(width=110), []
    console.print(machine(cores()))
    with tempfile.TemporaryDirectory() as scratch:
        for source in args.models:
            folder = export(source, Path(scratch, str(len(kept)))).path
            model = bundles.read(folder).name
            for pause in (0.0, args.pause_ms / 1e3):
                best: dict[int, dict[str, float]] = {}
                for _ in range(args.rounds):
                    for index in range(len(rows())):
                        found = in_a_process(folder, index, args.seconds, pause)
                        before = best.setdefault(index, found)
                        best[index] = min(before, found, key=lambda row: row["median_ms"])
                console.print(table(model, pause, best))
                kept += [
                    {"model": model, "pause_ms": pause * 1e3, **asdict(row), **best[index]}
                    for index, row in enumerate(rows())
                ]
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(cores()), "rows": kept}, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        where, number, length, gap = sys.argv[2:]
        print(json.dumps(measure(Path(where), rows()[int(number)], float(length), float(gap))))
    else:
        main()
