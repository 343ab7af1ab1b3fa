"""Which variant is taken, of measurements that are written down."""

from __future__ import annotations

import pytest

from attn_export.tuning.choose import as_fast, decide, is_faster

PLAIN = [[10.0, 10.2], [9.9, 10.1], [10.0, 10.0], [10.1, 10.3], [9.8, 10.0], [10.0, 10.1]]


def times(factor: float, noise: float = 0.0) -> list[list[float]]:
    """The plain rounds by a factor; every other round by some noise up, the others down."""
    return [
        [ms * factor * (1 + noise * (-1) ** index) for ms in row] for index, row in enumerate(PLAIN)
    ]


def test_the_fastest_is_taken_where_it_is_faster_beyond_noise() -> None:
    found = decide({"plain": PLAIN, "slow": times(1.2), "fast": times(0.8)}, "plain")
    assert found.name == "fast"
    assert found.why == "8 ms against 10, 0.80 of the plain export's"


def test_a_plain_export_that_is_the_fastest_is_kept() -> None:
    found = decide({"plain": PLAIN, "slow": times(1.2)}, "plain")
    assert found.name == "plain"
    assert found.why == "10 ms, and no other was faster beyond noise"


@pytest.mark.parametrize(
    ("factor", "noise", "taken"),
    [
        (0.98, 0.0, "other"),  # 2 % in every round
        (0.995, 0.0, "plain"),  # less than is worth another graph
        (0.97, 0.10, "plain"),  # 3 % between rounds that differ by 10 %
        (0.80, 0.10, "other"),
    ],
)
def test_the_plain_export_wins_ties_within_noise(factor: float, noise: float, taken: str) -> None:
    assert decide({"plain": PLAIN, "other": times(factor, noise)}, "plain").name == taken


def test_of_variants_that_are_as_fast_the_first_is_taken() -> None:
    one, other = times(0.800), times(0.796)
    assert decide({"plain": PLAIN, "one": one, "other": other}, "plain").name == "one"
    assert decide({"plain": PLAIN, "other": other, "one": one}, "plain").name == "other"


def test_one_that_is_as_fast_as_the_fastest_must_beat_the_plain_export_itself() -> None:
    """Noisy, it cannot be told from the fastest, nor from the plain export."""
    found = decide({"plain": PLAIN, "noisy": times(0.9, 0.2), "fast": times(0.8)}, "plain")
    assert found.name == "fast"


def test_too_few_rounds_decide_nothing() -> None:
    found = decide({"plain": PLAIN[:2], "fast": times(0.1)[:2]}, "plain")
    assert (found.name, found.why) == ("plain", "there was no time for 3 rounds")
    assert decide({"plain": PLAIN[:3], "fast": times(0.1)[:3]}, "plain").name == "fast"
    assert decide({"plain": PLAIN}, "plain").why == "nothing else was measured"


def test_as_fast_are_those_that_noise_does_not_tell_apart() -> None:
    measured = {"a": times(1.005), "b": PLAIN, "c": times(1.2), "d": times(1.05, 0.2)}
    assert as_fast(measured) == ["a", "b", "d"]
    assert is_faster(measured, "b", "c")
    assert not is_faster(measured, "b", "b")
