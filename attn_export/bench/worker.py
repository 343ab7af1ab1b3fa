"""One runtime in a process of its own: `python -m attn_export.bench.worker BUNDLE RUNTIME COMPONENT
THREADS CASE [SOURCE]`.

Reads one JSON request a line from stdin and answers each with one JSON line on the stdout that it
was started with; whatever a library prints goes to stderr. A batch of null is the case's own,
THREADS of 0 are those that were tuned, else all cores.

    {"do": "load", "allow_fallback": A}     -> {"first_ms", "load_ms"}: import, load and answer once
    {"do": "check", "batch": B}             -> {"passed", "failures", "placement"},
                                               "precision" and "accuracy"
    {"do": "run", "seconds": S, "batch": B} -> {"ms": [...]}
    {"do": "memory"}                        -> {"peak_rss_mb"}
    {"do": "work", "batch": B}              -> {"flops", "uncounted"}
    {"do": "peak", "seconds": S}            -> {"gflops"}: of one large product on this runtime
    {"do": "stop"}                          -> {}, and the process ends

"memory" comes before "work" and "peak", which take some of their own.
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
from attn_export.bench import products, torch_products
from attn_export.bench.batches import with_batch
from attn_export.bench.roofline import peak_gflops
from attn_export.errors import AttnExportError
from attn_export.precision import views
from attn_export.precision.scored import scored
from attn_export.precision.stored import native
from attn_export.reference import Case
from attn_export.runtimes import torch_eager
from attn_export.runtimes.base import LoadOptions, Session
from attn_export.runtimes.growing import timed
from attn_export.runtimes.table import MODULE_RUNTIMES, find, require
from attn_export.runtimes.threads import cores
from attn_export.sessions import as_grown, load
from attn_export.verifying.checking import check_session


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
        self.bundle, self.runtime = views.view(as_grown(bundles.read(Path(folder))), runtime)
        self.component, self.threads = component, threads or None
        cases = views.allowances(self.bundle, self.runtime, self.bundle.cases())
        self.cases = [c for c in cases if c.component == component]
        self.timed: dict[int | None, Case] = {None: next(c for c in self.cases if c.name == case)}
        self.source = source
        self.session: Session | None = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        if self.runtime in MODULE_RUNTIMES:
            require(self.runtime)
            import torch

            torch.set_num_threads(self.threads or cores())
        self.session = load(
            self.bundle, self.runtime, self.component, self.threads, self.source,
            LoadOptions(allow_fallback=bool(request.get("allow_fallback"))),
        )  # fmt: skip
        loaded = time.perf_counter()
        self.session.run(self.timed[None].inputs)
        return {
            "first_ms": (time.perf_counter() - start) * 1e3,
            "load_ms": (loaded - start) * 1e3,
        }

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """All stored cases for the case's own batch; for another one, that one."""
        assert self.session is not None
        batch = request.get("batch")
        cases = self.cases if batch is None else [self._case(batch)]
        found = list(check_session(self.bundle, self.session, cases))
        failures = [f"{case}, {c.output}: {c.problem}" for case, c in found if not c.passed]
        exact: dict[str, Any] = {}
        if not failures:
            compared = [c for _, c in found]
            exact = scored(
                self.bundle, self.runtime, self.component, self.session, self.cases, compared
            )
            failures += exact.pop("broken")
        return {
            "passed": bool(found) and not failures,
            "failures": failures,
            "placement": self.session.placement(),
            **exact,
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """At least one call. The first of several is not told: it finds the caches used by others,
        and their threads still spinning."""
        assert self.session is not None
        times: list[float] = []
        case = self._case(request.get("batch"))
        session, inputs = timed(self.session, case.inputs) or native(self.session, case.inputs)
        until = time.perf_counter() + float(request["seconds"])
        gc.disable()
        while not times or time.perf_counter() < until:
            start = time.perf_counter()
            session.run(inputs)
            times.append((time.perf_counter() - start) * 1e3)
        gc.enable()
        return {"ms": times[1:] or times}

    def memory(self, request: dict[str, Any]) -> dict[str, Any]:
        others = self.session.processes if self.session is not None else ()
        return {"peak_rss_mb": peak_rss_mb() + sum(map(peak_rss_mb, others))}

    def work(self, request: dict[str, Any]) -> dict[str, Any]:
        inputs = self._case(request.get("batch")).inputs
        session = self.session
        assert session is not None
        if self.runtime == torch_eager.NAME:
            return {"flops": torch_products.count(lambda: session.run(inputs)), "uncounted": {}}
        if self.runtime in MODULE_RUNTIMES:  # compiled code is not seen by PyTorch's counter
            return {"flops": None, "uncounted": {}}
        path = self.bundle.model_path(
            self.bundle.target_for(find(self.runtime).GRAPHS, self.component)
        )
        found = products.count(path, {name: array.shape for name, array in inputs.items()})
        return {"flops": found.flops, "uncounted": dict(found.uncounted)}

    def peak(self, request: dict[str, Any]) -> dict[str, Any]:
        return {
            "gflops": peak_gflops(self.runtime, self.threads or cores(), float(request["seconds"]))
        }

    def stop(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _case(self, batch: int | None) -> Case:
        if batch not in self.timed:
            assert batch is not None
            self.timed[batch] = with_batch(self.bundle, self.timed[None], batch)
        return self.timed[batch]


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
    actions = {
        action.__name__: action
        for action in (
            worker.load, worker.check, worker.run, worker.memory, worker.work, worker.peak,
            worker.stop,
        )
    }  # fmt: skip
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
