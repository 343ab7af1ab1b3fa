"""Percentiles and the median's interval: worked-out values, and its coverage."""

from __future__ import annotations

import numpy as np
import pytest

from attn_export.bench.stats import bracket, ratio_interval, summarize, summarize_rounds


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


def test_the_interval_of_rounds_is_that_of_their_medians_where_that_is_wider() -> None:
    """A thousand calls at 1 ms and a thousand at 2 ms are two observations, not two thousand."""
    rounds = [[1.0] * 100, [2.0] * 100] * 4
    pooled = summarize([ms for row in rounds for ms in row])
    assert (pooled.low, pooled.high) == (1.0, 2.0)
    drifting = [[float(speed)] * 100 for speed in (1, 2, 3, 4, 5, 6)]
    found = summarize_rounds(drifting)
    assert (found.median, found.low, found.high, found.runs) == (3.5, 1.0, 6.0, 600)
    assert summarize([ms for row in drifting for ms in row]).high < 5


def test_six_rounds_are_bracketed_by_their_extremes_and_24_are_not() -> None:
    assert bracket([1, 2, 3, 4, 5, 6]) == (1.0, 6.0)
    assert bracket(list(range(1, 25))) == (7.0, 18.0)  # binomial(24, 1/2): ranks 7 and 18, 97.7 %


def test_what_slows_both_in_a_round_leaves_their_ratio() -> None:
    """The machine runs at half of its speed in every other round; the ratio is 0.8 in each."""
    base = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]] * 6
    mine = [[ms * 0.8 for ms in row] for row in base]
    assert ratio_interval(mine, base) == pytest.approx((0.8, 0.8))
    assert summarize_rounds(mine).half_width > 0.2
    with pytest.raises(ValueError, match="11 rounds against 12"):
        ratio_interval(mine[1:], base)


def test_a_p99_takes_299_calls() -> None:
    """0.99^298 = 5.003 %, 0.99^299 = 4.95 %."""
    assert not summarize([1.0] * 298).p99_known
    assert summarize([1.0] * 299).p99_known
