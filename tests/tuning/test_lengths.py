"""Which op is best over lengths, and from which length on, of times that are written down."""

from __future__ import annotations

from attn_export.bench.stats import summarize
from attn_export.capability import Form
from attn_export.tuning.lengths import best_of, buckets
from attn_export.tuning.sites import Kind, SiteTimes
from tests.tuning.test_cache import SITE

KIND = Kind(SITE, Form(), None, (SITE.name,))


def at(tokens: int, **ms: float) -> SiteTimes:
    """Times without any noise; an op within 1 % of the fastest is as fast."""
    fastest = min(ms.values())
    as_fast = tuple(op for op, value in ms.items() if value <= 1.01 * fastest)
    found = {op: summarize([value]) for op, value in ms.items()}
    return SiteTimes(KIND, {"tokens": tokens}, (tokens, tokens), found, as_fast)


def test_an_op_that_is_best_at_each_length_is_best_over_all() -> None:
    rows = [at(64, a=1.0, b=2.0), at(256, a=3.0, b=4.0)]
    assert best_of(rows) == "a"
    assert buckets(rows) == [{"tokens": [64, 256], "op": "a"}]


def test_the_best_over_lengths_loses_least_and_the_buckets_tell_where_it_changes() -> None:
    """b is 1.1 times a at 64 tokens; a is 3 times b at 4,096."""
    rows = [at(4096, a=300.0, b=100.0), at(64, a=1.0, b=1.1), at(256, a=4.0, b=4.0)]
    assert best_of(rows) == "b"
    assert buckets(rows) == [{"tokens": [64, 256], "op": "a"}, {"tokens": [4096, 4096], "op": "b"}]


def test_of_ops_that_are_as_fast_everywhere_the_first_is_best() -> None:
    assert best_of([at(64, a=1.005, b=1.0), at(256, a=4.0, b=3.99)]) == "a"


def test_an_op_without_a_time_at_some_length_is_not_best_over_all() -> None:
    assert best_of([at(64, a=1.0, b=2.0), at(256, b=4.0)]) == "b"
