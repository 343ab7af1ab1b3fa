"""Does a process that serves grow? Resident memory over many runs, and over many sessions.

    python benchmarks/memory_soak.py [BUNDLE] [--runs 2000] [--sessions 50] [--json FILE]

Runs: one session over random lengths, after each length was run once. Sessions: opened, run and
closed one after the other, after five of them. Growth is what is resident at the end over what was
resident after that warm-up, in MB; it is measured in a process of its own, without PyTorch.

BUNDLE has one component with a dynamic size that is no batch; left out, it is the prefill of
`decoder-lm`, over lengths 1 to 256. Bounds, which `--check` exits 1 on: 8 MB over all runs, 8 MB
over all sessions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import attn_export
from attn_export import bundle as bundles

BOUND_MB = 8.0
WARM_SESSIONS = 5


def resident_mb() -> float:
    """Resident memory of this process in MB (proc(5), statm)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Load:
    """Inputs of one component at any length, drawn from its stored case."""

    def __init__(self, bundle: bundles.Bundle) -> None:
        self.component = bundle.components[0]
        self.entries = [e for e in bundle.manifest["inputs"] if e["component"] == self.component]
        self.example = next(c for c in bundle.cases() if c.component == self.component).inputs
        ranges = {k: v for e in self.entries for k, v in e["ranges"].items() if k != "batch"}
        ((self.size, (self.least, self.most)),) = ranges.items()

    def lengths(self) -> range:
        return range(self.least, self.most + 1)

    def inputs(self, length: int) -> dict[str, np.ndarray]:
        sizes = {"batch": 1, self.size: length}
        return {
            e["name"]: np.resize(self.example[e["name"]], [sizes.get(s, s) for s in e["shape"]])
            for e in self.entries
        }


def over_runs(folder: Path, runs: int) -> Iterator[float]:
    """Resident memory after the warm-up, and after each tenth of the runs."""
    load, generator = Load(bundles.read(folder)), random.Random(0)
    with attn_export.load(folder, component=load.component) as session:
        for length in load.lengths():
            session.run(load.inputs(length))
        yield resident_mb()
        for index in range(runs):
            session.run(load.inputs(generator.choice(load.lengths())))
            if (index + 1) % max(1, runs // 10) == 0:
                yield resident_mb()


def over_sessions(folder: Path, sessions: int) -> Iterator[float]:
    """Resident memory after the warm-up, and after each session."""
    load = Load(bundles.read(folder))
    for index in range(WARM_SESSIONS + sessions):
        with attn_export.load(folder, component=load.component) as session:
            session.run(load.inputs(load.most))
        if index + 1 >= WARM_SESSIONS:
            yield resident_mb()


def worker(folder: Path, runs: int, sessions: int) -> dict[str, Any]:
    begun = time.perf_counter()
    by_sessions = list(over_sessions(folder, sessions))
    by_runs = list(over_runs(folder, runs))
    return {
        "runs": runs, "runs_growth_mb": by_runs[-1] - by_runs[0], "runs_mb": by_runs,
        "sessions": sessions, "sessions_growth_mb": by_sessions[-1] - by_sessions[0],
        "sessions_mb": by_sessions, "seconds": time.perf_counter() - begun,
    }  # fmt: skip


def measure(folder: Path, runs: int, sessions: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", str(folder), str(runs), str(sessions)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is exceeded")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.bundle or attn_export.export("decoder-lm", Path(scratch, "bundle")).path
        found = measure(folder, args.runs, args.sessions)
    over = []
    for what in ("runs", "sessions"):
        growth, trace = found[f"{what}_growth_mb"], found[f"{what}_mb"]
        print(f"{found[what]} {what}: {growth:+.1f} MB after warm-up ({trace[0]:.1f} to"
              f" {trace[-1]:.1f} MB, highest {max(trace):.1f})")  # fmt: skip
        over += [what] if growth > BOUND_MB else []
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))
    if args.check and over:
        sys.exit(f"memory grows by more than {BOUND_MB} MB over the {' and the '.join(over)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        where, run_count, session_count = sys.argv[2:]
        print(json.dumps(worker(Path(where), int(run_count), int(session_count))))
    else:
        main()
