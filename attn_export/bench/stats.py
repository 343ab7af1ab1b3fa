"""Statistics of latencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.96  # two-sided 95 %


@dataclass(frozen=True)
class Latency:
    """Milliseconds over `runs` calls; `low` and `high` bound the median with 95 % confidence."""

    median: float
    p90: float
    p99: float
    low: float
    high: float
    runs: int

    @property
    def half_width(self) -> float:
        """Half of the confidence interval as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def summarize(milliseconds: Sequence[float]) -> Latency:
    """Percentiles, and the median's interval from order statistics (no normality assumed).

    The number of calls below the median is binomial(n, 1/2), so the ranks n/2 -+ Z sqrt(n)/2
    bracket it (Conover, Practical Nonparametric Statistics).

    Raises:
        ValueError: there are no calls.
    """
    if not milliseconds:
        raise ValueError("no calls were timed")
    ordered = np.sort(np.asarray(milliseconds, dtype=np.float64))
    n = ordered.size
    reach = Z * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - reach) - 1)
    high = min(n - 1, math.ceil(n / 2 + reach))
    p50, p90, p99 = (float(value) for value in np.percentile(ordered, (50, 90, 99)))
    return Latency(p50, p90, p99, float(ordered[low]), float(ordered[high]), n)
