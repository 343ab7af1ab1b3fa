"""Time a bundle's runtimes against each other."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.bench.process import WorkerProcess
from attn_export.bench.stats import Latency, summarize
from attn_export.errors import CheckFailed, RuntimeUnavailable, UsageError
from attn_export.runtimes import torch_eager
from attn_export.runtimes.packages import versions
from attn_export.runtimes.table import available
from attn_export.runtimes.threads import cores

NARROW = 0.02  # the median is known well enough when its interval is within 2 % of it
NOISY = 0.10  # beyond it a median, and every ratio with it, is said to be uncertain
ROUND_SECONDS = 0.25
WARM_UP_SECONDS = 0.5


@dataclass(frozen=True)
class Timing:
    """What one runtime's process measured.

    Attributes:
        latency: of one call on `case`, inputs and outputs in host memory.
        cold_start_ms: importing, loading and the first answer.
        peak_rss_mb: of the whole process, Python and libraries included.
        failures: what its parity check found; a runtime with any has no latency.
    """

    latency: Latency | None
    cold_start_ms: float
    peak_rss_mb: float
    placement: Mapping[str, int]
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """The result of `benchmark`."""

    timings: Mapping[str, Timing]
    baseline: str | None
    case: str
    threads: int
    seconds: float
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(not timing.failures for timing in self.timings.values())

    @property
    def noisy(self) -> dict[str, float]:
        """Runtimes whose median is not known well, with half of its interval as a share of it."""
        halves = {n: t.latency.half_width for n, t in self.timings.items() if t.latency}
        return {name: half for name, half in halves.items() if half > NOISY}

    def ratio(self, runtime: str) -> float | None:
        """This median over the baseline's: below 1 is faster."""
        base = self.timings[self.baseline].latency if self.baseline else None
        mine = self.timings[runtime].latency
        return None if base is None or mine is None else mine.median / base.median

    def to_json(self) -> dict[str, Any]:
        """The `bench --json` object."""
        return {
            "runtimes": {name: self._runtime(name) for name in self.timings},
            "baseline": self.baseline,
            "noisy": self.noisy,
            "unavailable": dict(self.unavailable),
            "case": self.case,
            "machine": machine(self.threads),
            "versions": versions(),
        }

    def _runtime(self, name: str) -> dict[str, Any]:
        timing = self.timings[name]
        latency = timing.latency
        return {
            "median_ms": latency.median if latency else None,
            "median_low_ms": latency.low if latency else None,
            "median_high_ms": latency.high if latency else None,
            "p90_ms": latency.p90 if latency else None,
            "p99_ms": latency.p99 if latency else None,
            "runs": latency.runs if latency else 0,
            "cold_start_ms": timing.cold_start_ms,
            "peak_rss_mb": timing.peak_rss_mb,
            "ratio_to_baseline": self.ratio(name),
            "placement": dict(timing.placement),
            "parity": {"passed": not timing.failures, "failures": list(timing.failures)},
        }


def machine(threads: int) -> dict[str, Any]:
    """Processor, cores and threads of this machine."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
    }


def benchmark(
    bundle: Path | str | bundles.Bundle,
    runtimes: Sequence[str] = (),
    *,
    baseline: str | None = None,
    source: str | None = None,
    component: str | None = None,
    seconds: float = 6.0,
    allow_fallback: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Benchmark:
    """Time each runtime in its own process, in interleaved rounds, on the bundle's first case.

    Rounds go on until every median's 95 % interval is within 2 % of it, or the time is up.

    Args:
        runtimes: by default those that the bundle was exported for and that work here.
        baseline: a runtime that the others are divided by; "torch" where it is installed.
        source: the PyTorch model of the torch runtime; the manifest's where it is left out.
        seconds: timed seconds for each runtime, at most.
        allow_fallback: let another provider than the one asked for run attention.

    Raises:
        FileError, UsageError, RuntimeUnavailable: as `verify`.
    """
    found = bundle if isinstance(bundle, bundles.Bundle) else bundles.read(Path(bundle))
    wanted, missing = list(runtimes), dict[str, RuntimeUnavailable]()
    if not wanted:
        wanted, missing = available(list(dict.fromkeys(t["runtime"] for t in found.targets())))
    if missing and not wanted:
        raise next(iter(missing.values()))
    if baseline is None and torch_eager.availability().ok:
        baseline = torch_eager.NAME
    if baseline is not None and baseline not in wanted:
        wanted.insert(0, baseline)
    component = component or found.components[0]
    case = next((c.name for c in found.cases() if c.component == component), None)
    if case is None:
        raise UsageError(f"the bundle has no case for '{component}'", "name another component")
    threads = cores()
    with ExitStack() as stack:
        workers = {}
        for name in wanted:
            arguments = [str(found.path), name, component, str(threads), case]
            arguments += [source] if source else []
            workers[name] = stack.enter_context(WorkerProcess(name, arguments))
        result = _measure(workers, baseline, case, threads, seconds, allow_fallback, progress)
    return replace(result, unavailable={name: str(error) for name, error in missing.items()})


def _measure(
    workers: Mapping[str, WorkerProcess],
    baseline: str | None,
    case: str,
    threads: int,
    seconds: float,
    allow_fallback: bool,
    progress: Callable[[str], None],
) -> Benchmark:
    cold, checks = {}, {}
    for name, worker in workers.items():
        progress(f"starting {name}")
        cold[name] = float(worker.ask("load", allow_fallback=allow_fallback)["first_ms"])
        checks[name] = worker.ask("check")
    sound = {name: worker for name, worker in workers.items() if checks[name]["passed"]}
    for worker in sound.values():
        worker.ask("run", seconds=WARM_UP_SECONDS)
    times: dict[str, list[float]] = {name: [] for name in sound}
    for index in range(max(1, round(seconds / ROUND_SECONDS)) if sound else 0):
        progress(f"timing, round {index + 1}")
        for name, worker in sound.items():
            times[name] += worker.ask("run", seconds=ROUND_SECONDS)["ms"]
        if index >= 3 and all(summarize(row).half_width < NARROW for row in times.values()):
            break
    timings = {
        name: Timing(
            latency=summarize(times[name]) if name in sound else None,
            cold_start_ms=cold[name],
            peak_rss_mb=float(worker.ask("stop")["peak_rss_mb"]),
            placement=checks[name]["placement"],
            failures=tuple(checks[name]["failures"]) if name not in sound else (),
        )
        for name, worker in workers.items()
    }
    return Benchmark(timings, baseline, case, threads, seconds)


def require_parity(result: Benchmark) -> None:
    """Raise CheckFailed where a runtime's answers were wrong, so that it was not timed."""
    for name, timing in result.timings.items():
        if timing.failures:
            raise CheckFailed(
                f"{name} was not timed since it differs from PyTorch, {timing.failures[0]}",
                "run verify",
            )
