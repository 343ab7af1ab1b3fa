"""Time a bundle's runtimes against each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.bench.batches import batch_of, check_batches
from attn_export.bench.machine import machine
from attn_export.bench.process import WorkerProcess
from attn_export.bench.result import Benchmark, Timing
from attn_export.bench.stats import FEWEST_ROUNDS, summarize_rounds
from attn_export.errors import AttnExportError, RuntimeUnavailable, UsageError
from attn_export.precision import views
from attn_export.runtimes import torch_eager
from attn_export.runtimes.table import available
from attn_export.runtimes.threads import cores

NARROW = 0.02  # the median is known well enough when its interval is within 2 % of it
PEAK_SECONDS = 0.5

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Pace:
    """Seconds of a round, and of the calls before the first."""

    round: float = 0.25
    warm_up: float = 0.5


PACE = Pace()


def benchmark(
    bundle: Path | str | bundles.Bundle,
    runtimes: Sequence[str] = (),
    *,
    baseline: str | None = None,
    source: str | None = None,
    component: str | None = None,
    batches: Sequence[int] = (),
    seconds: float = 6.0,
    allow_fallback: bool = False,
    progress: Progress = lambda _: None,
) -> Benchmark:
    """Time each runtime in its own process, in interleaved rounds, on the bundle's first case.

    Rounds go on until every median's 95 % interval is within 2 % of it and there are enough calls
    for the 99th percentile, or the time is up.

    Args:
        runtimes: by default those that the bundle was exported for and that work here.
        baseline: a runtime that the others are divided by; "torch" where it is installed, none
            where this is empty.
        source: the PyTorch model of the torch runtime; the manifest's where it is left out.
        batches: rows of a call; by default those of the case.
        seconds: timed seconds for each runtime and batch size, at most.
        allow_fallback: let another provider than the one asked for run attention.

    Raises:
        FileError, UsageError, RuntimeUnavailable: as `verify`; UsageError also for a batch that the
            model does not take.
    """
    found = bundle if isinstance(bundle, bundles.Bundle) else bundles.read(Path(bundle))
    wanted, missing = list(runtimes), dict[str, RuntimeUnavailable]()
    if not wanted:
        wanted, missing = available(list(dict.fromkeys(t["runtime"] for t in found.targets())))
        wanted = views.labels(found, wanted)
    if missing and not wanted:
        raise next(iter(missing.values()))
    if baseline is None and torch_eager.availability().ok:
        baseline = torch_eager.NAME
    baseline = baseline or None
    if baseline is not None and baseline not in wanted:
        wanted.insert(0, baseline)
    component = component or found.components[0]
    case = next((c for c in found.cases() if c.component == component), None)
    if case is None:
        raise UsageError(f"the bundle has no case for '{component}'", "name another component")
    if batches:
        check_batches(found, component, batches)
    here = machine(cores())
    sizes: list[int | None] = list(dict.fromkeys(batches)) or [None]
    with ExitStack() as stack:
        workers = {}
        for name in wanted:
            arguments = [str(found.path), name, component, "0", case.name]
            arguments += [source] if source else []
            workers[name] = stack.enter_context(WorkerProcess(name, arguments))
        rows = measure(workers, sizes, seconds, progress, allow_fallback=allow_fallback)
    own = batch_of([e for e in found.manifest["inputs"] if e["component"] == component],
                   case.inputs)  # fmt: skip
    timings = {
        size: {name: row.timing(own if size is None else size) for name, row in rows[size].items()}
        for size in sizes
    }
    return Benchmark(
        timings=timings[sizes[0]],
        baseline=baseline,
        case=case.name,
        machine=here,
        model=found.name,
        component=component,
        unavailable={name: str(error) for name, error in missing.items()},
        batches={size: row for size, row in timings.items() if size is not None},
    )


@dataclass
class Row:
    """One worker at one batch size, while it is being measured."""

    worker: WorkerProcess
    loaded: Mapping[str, Any]
    check: Mapping[str, Any]
    rounds: list[list[float]] = field(default_factory=list)
    peak_rss_mb: float = 0.0
    work: Mapping[str, Any] = field(default_factory=dict)
    peak_gflops: float | None = None

    @property
    def sound(self) -> bool:
        return bool(self.check["passed"])

    @property
    def is_known(self) -> bool:
        """Whether more rounds would change little."""
        if len(self.rounds) < FEWEST_ROUNDS:
            return False
        latency = summarize_rounds(self.rounds)
        return latency.half_width < NARROW and latency.p99_known

    def timing(self, batch: int) -> Timing:
        return Timing(
            rounds=self.rounds,
            cold_start_ms=float(self.loaded["first_ms"]),
            peak_rss_mb=self.peak_rss_mb,
            placement=self.check["placement"],
            failures=() if self.sound else tuple(self.check["failures"]) or ("nothing compared",),
            batch=batch,
            load_ms=float(self.loaded["load_ms"]),
            flops=self.work.get("flops"),
            uncounted=self.work.get("uncounted", {}),
            peak_gflops=self.peak_gflops,
            precision=self.check.get("precision", "fp32"),
            accuracy=self.check.get("accuracy", ""),
        )


def measure(
    workers: Mapping[str, WorkerProcess],
    batches: Sequence[int | None],
    seconds: float,
    progress: Progress,
    *,
    allow_fallback: bool = False,
    describe: bool = True,
    pace: Pace = PACE,
    refused: dict[str, AttnExportError] | None = None,
) -> dict[int | None, dict[str, Row]]:
    """Check each worker's answers, then time those that are right, in rounds, taking turns.

    Args:
        batches: rows of a call, None for the case's own.
        seconds: timed, for each worker and batch; a call that takes longer is made once.
        allow_fallback: as `benchmark`.
        describe: tell also memory, products and the matrix-multiply peak.
        refused: gets what a worker's runtime says that refuses to load or dies meanwhile, instead
            of an error; that worker has no row.
    """
    rows: dict[int | None, dict[str, Row]] = {batch: {} for batch in batches}
    for name, worker in workers.items():
        progress(f"starting {name}")
        try:
            loaded = worker.ask("load", allow_fallback=allow_fallback)
            own = worker.ask("check", batch=None)
        except AttnExportError as error:
            if refused is None:
                raise
            refused[name] = error
            continue
        for batch in batches:
            again = batch is not None and own["passed"]
            check = worker.ask("check", batch=batch) if again else own
            rows[batch][name] = Row(worker, loaded, check)
    running = [(b, row) for b, named in rows.items() for row in named.values() if row.sound]
    for batch, row in running:
        row.worker.ask("run", seconds=pace.warm_up, batch=batch)
    _take_turns(running, seconds, pace.round, progress)
    for name, worker in workers.items() if describe else ():
        progress(f"measuring the matrix-multiply peak of {name}")
        memory = float(worker.ask("memory")["peak_rss_mb"])
        mine = [(batch, rows[batch][name]) for batch in batches]
        peak = None
        if any(row.sound for _, row in mine):
            peak = worker.ask("peak", seconds=PEAK_SECONDS)["gflops"]
        for batch, row in mine:
            row.peak_rss_mb, row.peak_gflops = memory, peak
            row.work = worker.ask("work", batch=batch) if row.sound else {}
        worker.ask("stop")
    return rows


def _take_turns(
    running: Sequence[tuple[int | None, Row]], seconds: float, length: float, progress: Progress
) -> None:
    """Rounds, every other one backwards, so that none is always behind the same neighbour."""
    spent, index = 0.0, 0
    while running and (index == 0 or spent < seconds):
        progress(f"timing, round {index + 1}")
        longest = 0.0
        for batch, row in running if index % 2 == 0 else reversed(running):
            times = row.worker.ask("run", seconds=length, batch=batch)["ms"]
            row.rounds.append(times)
            longest = max(longest, sum(times) / 1e3)
        spent += max(longest, length)
        index += 1
        if all(row.is_known for _, row in running):
            return
