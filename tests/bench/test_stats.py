"""Percentiles and the median's interval: worked-out values, and its coverage."""

from __future__ import annotations

import numpy as np
import pytest

from attn_export.bench.stats import summarize


def test_percentiles_of_one_to_a_hundred_and_one() -> None:
    found = summarize([float(v) for v in range(101, 0, -1)])
    assert (found.median, found.p90, found.p99, found.runs) == (51.0, 91.0, 100.0, 101)


def test_ranks_that_bracket_the_median_of_a_hundred() -> None:
    """Conover's table for n = 100: the 40th and the 61st value bracket the median at 95 %."""
    found = summarize([float(v) for v in range(1, 101)])
    assert found.low <= 40
    assert found.high >= 61
    assert found.low >= 39
    assert found.high <= 62


@pytest.mark.parametrize("times", [[5.0], [5.0, 7.0], [7.0, 5.0, 6.0]])
def test_a_few_calls_are_bracketed_by_all_of_them(times: list[float]) -> None:
    found = summarize(times)
    assert (found.low, found.high) == (min(times), max(times))


def test_the_interval_covers_the_median_of_a_skewed_distribution_nineteen_times_in_twenty() -> None:
    random = np.random.default_rng(0)
    draws = [summarize(list(random.lognormal(size=60))) for _ in range(2000)]
    covered = np.mean([row.low <= 1.0 <= row.high for row in draws])
    assert 0.95 <= covered <= 0.985


def test_one_slow_call_moves_neither_the_median_nor_its_interval() -> None:
    calm = [1.0 + i / 1000 for i in range(100)]
    assert summarize([*calm[:-1], 1e6]).high == summarize(calm).high


def test_half_width_is_a_share_of_the_median() -> None:
    found = summarize([9.0, 10.0, 11.0])
    assert found.half_width == 0.1
    assert summarize([0.0]).half_width == 0.0


def test_no_calls_are_no_statistics() -> None:
    with pytest.raises(ValueError, match="no calls were timed"):
        summarize([])
