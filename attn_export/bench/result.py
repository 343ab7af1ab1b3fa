"""What a benchmark found, and the object that `bench --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_export.bench.machine import BUSY
from attn_export.bench.stats import Latency, ratio_interval, summarize_rounds
from attn_export.errors import CheckFailed
from attn_export.runtimes.packages import versions

NOISY = 0.10  # beyond it a median, and every ratio with it, is said to be uncertain


@dataclass(frozen=True)
class Timing:
    """What one runtime's process measured at one batch size.

    Attributes:
        rounds: milliseconds of each call, in each round; inputs and outputs in host memory. None
            for a runtime with `failures`.
        batch: rows of one call.
        cold_start_ms: importing, loading and the first answer; `load_ms` without that answer.
        peak_rss_mb: of the whole process, Python and libraries included, at all batch sizes.
        failures: what its parity check found.
        flops: of the matrix products of one call; None where it was not counted.
        uncounted: products whose sizes are not known, as operator to how many.
        peak_gflops: of one large matrix product on this runtime, with the same threads.
        precision: what its graph is computed in.
        accuracy: in words, where a bundle has more than float32.
    """

    rounds: Sequence[Sequence[float]]
    cold_start_ms: float
    peak_rss_mb: float
    placement: Mapping[str, int]
    failures: tuple[str, ...] = ()
    batch: int = 1
    load_ms: float = 0.0
    flops: int | None = None
    uncounted: Mapping[str, int] = field(default_factory=dict)
    peak_gflops: float | None = None
    precision: str = "fp32"
    accuracy: str = ""

    @property
    def latency(self) -> Latency | None:
        """None for a runtime whose parity failed."""
        return None if self.failures else summarize_rounds(self.rounds)

    @property
    def gflops(self) -> float | None:
        """Achieved in matrix products, if all of the time went into them."""
        latency = self.latency
        return self.flops / latency.median / 1e6 if self.flops and latency else None

    def to_json(self) -> dict[str, Any]:
        latency, gflops = self.latency, self.gflops
        share = gflops / self.peak_gflops if gflops and self.peak_gflops else None
        return {
            "median_ms": latency.median if latency else None,
            "median_low_ms": latency.low if latency else None,
            "median_high_ms": latency.high if latency else None,
            "p90_ms": latency.p90 if latency else None,
            "p99_ms": latency.p99 if latency else None,
            "p99_known": bool(latency and latency.p99_known),
            "runs": latency.runs if latency else 0,
            "rounds": len(self.rounds),
            "batch": self.batch,
            "rows_per_second": self.batch * 1e3 / latency.median if latency else None,
            "cold_start_ms": self.cold_start_ms,
            "load_ms": self.load_ms,
            "peak_rss_mb": self.peak_rss_mb,
            "product_gflop": None if self.flops is None else self.flops / 1e9,
            "uncounted_products": dict(self.uncounted),
            "gflops": gflops,
            "peak_gflops": self.peak_gflops,
            "share_of_peak": share,
            "placement": dict(self.placement),
            "precision": self.precision,
            "accuracy": self.accuracy,
            "parity": {"passed": not self.failures, "failures": list(self.failures)},
        }


@dataclass(frozen=True)
class Benchmark:
    """The result of `benchmark`.

    Attributes:
        timings: at the batch of the case, or at the first one asked for.
        case: name of the stored case whose inputs are used.
        machine: what `attn_export.bench.machine.machine` saw before the first runtime started.
        batches: timings at each batch size that was asked for.
    """

    timings: Mapping[str, Timing]
    baseline: str | None
    case: str
    machine: Mapping[str, Any]
    model: str = ""
    component: str = "model"
    unavailable: Mapping[str, str] = field(default_factory=dict)
    batches: Mapping[int, Mapping[str, Timing]] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        return int(self.machine["threads"])

    @property
    def passed(self) -> bool:
        return not any(timing.failures for row in self.all_timings() for timing in row.values())

    def all_timings(self) -> list[Mapping[str, Timing]]:
        """The timings at each batch size."""
        return list(self.batches.values()) or [self.timings]

    @property
    def noisy(self) -> dict[str, float]:
        """Runtimes whose median is not known well, with half of its interval as a share of it."""
        found: dict[str, float] = {}
        for row in self.all_timings():
            for name, timing in row.items():
                half = timing.latency.half_width if timing.latency else 0.0
                if half > NOISY:
                    found[name] = max(half, found.get(name, 0.0))
        return found

    @property
    def busy(self) -> bool:
        """Whether something else was using the machine before the first run."""
        return float(self.machine.get("load_average", 0.0)) > BUSY

    def ratio(self, runtime: str, timings: Mapping[str, Timing] | None = None) -> float | None:
        """This median over the baseline's: below 1 is faster."""
        row = self.timings if timings is None else timings
        base = row[self.baseline].latency if self.baseline else None
        mine = row[runtime].latency
        return None if base is None or mine is None else mine.median / base.median

    def to_json(self) -> dict[str, Any]:
        """The `bench --json` object."""
        return {
            "model": self.model,
            "component": self.component,
            "runtimes": self._rows(self.timings),
            "baseline": self.baseline,
            "batches": {str(batch): self._rows(row) for batch, row in self.batches.items()},
            "noisy": self.noisy,
            "busy": self.busy,
            "unavailable": dict(self.unavailable),
            "case": self.case,
            "machine": dict(self.machine),
            "versions": versions(),
        }

    def _rows(self, timings: Mapping[str, Timing]) -> dict[str, Any]:
        rows = {}
        for name, timing in timings.items():
            low, high = self._ratio_interval(name, timings)
            ratio = self.ratio(name, timings)
            of = {"ratio_to_baseline": ratio, "ratio_low": low, "ratio_high": high}
            rows[name] = {**timing.to_json(), **of}
        return rows

    def _ratio_interval(
        self, name: str, timings: Mapping[str, Timing]
    ) -> tuple[float, float] | tuple[None, None]:
        """Widened to the ratio itself, which is that of the medians of all calls."""
        ratio = self.ratio(name, timings)
        if ratio is None or self.baseline is None:
            return None, None
        low, high = ratio_interval(timings[name].rounds, timings[self.baseline].rounds)
        return min(low, ratio), max(high, ratio)


def require_parity(result: Benchmark) -> None:
    """Raise CheckFailed where a runtime's answers were wrong, so that it was not timed."""
    for timings in result.all_timings():
        for name, timing in timings.items():
            if timing.failures:
                raise CheckFailed(
                    f"{name} was not timed since it differs from PyTorch, {timing.failures[0]}",
                    "run verify",
                )
