"""Which of several measured variants is taken. Pure: it sees times alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attn_export.bench.stats import ratio_interval, summarize_rounds

Rounds = Sequence[Sequence[float]]
FEWEST = 3  # fewer rounds say nothing of how much rounds differ
MARGIN = 0.01  # a gain that is smaller is not worth another graph


@dataclass(frozen=True)
class Decision:
    """What was taken, and why, as a clause."""

    name: str
    why: str


def decide(measured: Mapping[str, Rounds], plain: str) -> Decision:
    """The fastest variant if it is faster than the plain one beyond noise, else the plain one.

    All were timed in the same rounds. A ratio counts where its 95 % interval, of the ratios in each
    round, lies below 1 - MARGIN. Of variants that are as fast as the fastest the first is taken.

    Args:
        measured: variant -> its rounds, in the order of preference; those whose answers were wrong
            are not among them.
        plain: a key of `measured`.
    """
    if len(measured) == 1:
        return Decision(plain, "nothing else was measured")
    if len(measured[plain]) < FEWEST:
        return Decision(plain, f"there was no time for {FEWEST} rounds")
    medians = {name: summarize_rounds(rounds).median for name, rounds in measured.items()}
    fastest = min(medians, key=medians.__getitem__)
    gains = [name for name in measured if name != plain and is_faster(measured, name, plain)]
    if not gains:
        told = f"{medians[plain]:.3g} ms, and no other was faster beyond noise"
        return Decision(plain, told)
    taken = next(
        name for name in gains if name == fastest or not is_faster(measured, fastest, name)
    )
    ratio = medians[taken] / medians[plain]
    told = (
        f"{medians[taken]:.3g} ms against {medians[plain]:.3g}, {ratio:.2f} of the plain export's"
    )
    return Decision(taken, told)


def is_faster(measured: Mapping[str, Rounds], one: str, other: str) -> bool:
    """Whether one is faster than another beyond noise."""
    if one == other:
        return False
    _, high = ratio_interval(measured[one], measured[other])
    median = summarize_rounds(measured[one]).median / summarize_rounds(measured[other]).median
    return max(high, median) < 1 - MARGIN


def as_fast(measured: Mapping[str, Rounds]) -> list[str]:
    """Those that the fastest is not faster than beyond noise, in the order given."""
    medians = {name: summarize_rounds(rounds).median for name, rounds in measured.items()}
    fastest = min(medians, key=medians.__getitem__)
    return [name for name in measured if name == fastest or not is_faster(measured, fastest, name)]
