"""Statistics of latencies: calls are timed in rounds, in which the runtimes take turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Z = 1.96  # two-sided 95 %
FEWEST_ROUNDS = 6  # the smallest and the largest of six bracket their median with 97 %
P99_RUNS = 299  # 0.99^299 < 5 %: of fewer calls not even the slowest bounds p99 with 95 %


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

    @property
    def p99_known(self) -> bool:
        """Whether there are enough calls for `p99` to say more than the slowest of them."""
        return self.runs >= P99_RUNS


def bracket(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the median from order statistics (no normality assumed).

    The number of values below the median is binomial(n, 1/2), so the ranks n/2 -+ Z sqrt(n)/2
    bracket it (Conover, Practical Nonparametric Statistics). Fewer than six values are bracketed
    by all of them, with less confidence.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = ordered.size
    reach = Z * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - reach) - 1)
    high = min(n - 1, math.ceil(n / 2 + reach))
    return float(ordered[low]), float(ordered[high])


def summarize(milliseconds: Sequence[float]) -> Latency:
    """Percentiles of independent calls, and the median's interval.

    Raises:
        ValueError: there are no calls.
    """
    if not milliseconds:
        raise ValueError("no calls were timed")
    p50, p90, p99 = (float(v) for v in np.percentile(np.asarray(milliseconds), (50, 90, 99)))
    low, high = bracket(milliseconds)
    return Latency(p50, p90, p99, low, high, len(milliseconds))


def summarize_rounds(rounds: Sequence[Sequence[float]]) -> Latency:
    """As `summarize`, for calls that are alike within a round and differ more between rounds.

    The interval is the wider one of that of the calls and that of the rounds' medians: a machine
    that changes its speed every second makes a thousand calls of one second one observation.

    Raises:
        ValueError: there are no calls.
    """
    pooled = summarize([ms for row in rounds for ms in row])
    low, high = bracket(_medians(rounds))
    return replace(pooled, low=min(pooled.low, low), high=max(pooled.high, high))


def ratio_interval(
    mine: Sequence[Sequence[float]], base: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """The 95 % interval of the ratio of two medians, from the ratio in each round.

    Both were timed in each round, one after the other, so that what slows the machine slows both.

    Raises:
        ValueError: the rounds are not the same.
    """
    if len(mine) != len(base):
        raise ValueError(f"{len(mine)} rounds against {len(base)}")
    return bracket([m / b for m, b in zip(_medians(mine), _medians(base), strict=True)])


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [float(np.median(row)) for row in rounds if row]
