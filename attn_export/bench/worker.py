"""One runtime in a process of its own: `python -m attn_export.bench.worker BUNDLE RUNTIME COMPONENT
THREADS CASE [SOURCE]`.

Reads one JSON request a line from stdin and answers each with one JSON line on the stdout that it
was started with; whatever a library prints goes to stderr.

    {"do": "load", "allow_fallback": A} -> {"first_ms"}: import, load and answer once
    {"do": "check"}             -> {"passed", "failures", "max_abs", "placement"}
    {"do": "run", "seconds": S} -> {"ms": [...]}
    {"do": "stop"}              -> {"peak_rss_mb"}, and the process ends
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.errors import AttnExportError
from attn_export.runtimes.base import LoadOptions, Session
from attn_export.runtimes.table import MODULE_RUNTIMES, require
from attn_export.sessions import load
from attn_export.verification import check_session


class Worker:
    def __init__(
        self,
        folder: str,
        runtime: str,
        component: str,
        threads: int,
        case: str,
        source: str | None = None,
    ) -> None:
        self.bundle = bundles.read(Path(folder))
        self.runtime, self.component, self.threads = runtime, component, threads
        self.cases = [c for c in self.bundle.cases() if c.component == component]
        self.inputs = next(c.inputs for c in self.cases if c.name == case)
        self.source = source
        self.session: Session | None = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        if self.runtime in MODULE_RUNTIMES:
            require(self.runtime)
            import torch

            torch.set_num_threads(self.threads)
        self.session = load(
            self.bundle, self.runtime, self.component, self.threads, self.source,
            LoadOptions(allow_fallback=bool(request.get("allow_fallback"))),
        )  # fmt: skip
        self.session.run(self.inputs)
        return {"first_ms": (time.perf_counter() - start) * 1e3}

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.session is not None
        found = list(check_session(self.bundle, self.session, self.cases))
        failures = [f"{case}, {c.output}: {c.problem}" for case, c in found if not c.passed]
        return {
            "passed": bool(found) and not failures,
            "failures": failures,
            "placement": self.session.placement(),
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.session is not None
        times: list[float] = []
        until = time.perf_counter() + float(request["seconds"])
        gc.disable()
        while not times or time.perf_counter() < until:
            start = time.perf_counter()
            self.session.run(self.inputs)
            times.append((time.perf_counter() - start) * 1e3)
        gc.enable()
        return {"ms": times}

    def stop(self, request: dict[str, Any]) -> dict[str, Any]:
        others = self.session.processes if self.session is not None else ()
        return {"peak_rss_mb": peak_rss_mb() + sum(map(peak_rss_mb, others))}


def peak_rss_mb(process: int | None = None) -> float:
    """Peak resident memory of this process, or of another one, in MB.

    Linux's own high-water mark where it can be read: getrusage's survives exec, so that a child of
    a large process starts with its parent's.
    """
    status = Path(f"/proc/{process or 'self'}/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    if process is not None:  # nothing else knows of one that still runs
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, runtime, component, threads, case, *source = arguments
    worker = Worker(folder, runtime, component, int(threads), case, *source)
    actions = {"load": worker.load, "check": worker.check, "run": worker.run, "stop": worker.stop}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = actions[request["do"]](request)
        except AttnExportError as error:
            answer = {"error": [type(error).__name__, error.observed, error.way_out]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if request["do"] == "stop":
            break


if __name__ == "__main__":
    main(sys.argv[1:])
