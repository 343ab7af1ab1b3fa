"""Latency next to accuracy for each precision, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from attn_export.precision.names import split_label

Interval = tuple[float, float, float]  # median, low, high


class Timed(Protocol):
    """A benchmark's result, as far as these lines need it."""

    @property
    def timings(self) -> Mapping[str, Any]: ...


def precision_lines(result: Timed) -> list[str]:
    """Latency next to accuracy, for each precision beside fp32."""
    timings = result.timings
    return speed_lines(
        {
            name: (row.latency.median, row.latency.low, row.latency.high) if row.latency else None
            for name, row in timings.items()
        },
        {name: row.precision for name, row in timings.items()},
        {name: row.accuracy for name, row in timings.items()},
    )


def speed_lines(
    medians: Mapping[str, Interval | None],
    precisions: Mapping[str, str],
    scores: Mapping[str, str],
) -> list[str]:
    """A line for each label that is not fp32: its latency against fp32's, and how exact it is.

    Args:
        medians: label -> median in milliseconds with its 95 % interval; None where not timed.
        precisions: label -> precision.
        scores: label -> its accuracy, in words.
    """
    lines = []
    for label, precision in precisions.items():
        if precision == "fp32":
            continue
        runtime, _ = split_label(label)
        base = next(
            (n for n, p in precisions.items() if p == "fp32" and split_label(n)[0] == runtime), None
        )
        lines.append(_line(label, precision, medians, base, scores.get(label, "")))
    return lines


def _line(
    label: str, precision: str, medians: Mapping[str, Interval | None], base: str | None, score: str
) -> str:
    mine = medians.get(label)
    name = label if split_label(label)[1] else f"{label} in {precision}"
    told = f"{name}: {score + ', ' if score else ''}"
    if mine is None:
        return f"{told}not timed"
    reference = medians.get(base) if base is not None else None
    median, low, high = mine
    told += f"{median:.3f} ms"
    if reference is None:
        return f"{told}; fp32 was not timed beside it, --precision fp32,{precision} does both"
    ratio = median / reference[0]
    if low <= reference[2] and reference[1] <= high:
        return f"{told}, not told apart from fp32 ({reference[0]:.3f} ms)"
    if ratio < 1:
        return f"{told}, {1 / ratio:.2f} times as fast as fp32 ({reference[0]:.3f} ms)"
    return f"{told}, SLOWER than fp32 by {ratio - 1:.0%} ({reference[0]:.3f} ms)"


def accuracy(result: Mapping[str, Any], metric: Mapping[str, Any] | None) -> str:
    """A runtime's score, or else its worst cosine, from the `verify --json` object."""
    if metric is not None and result.get("metric") is not None:
        change = result["metric"] - metric["reference"]
        return f"{metric['kind']} {result['metric']:.2%} ({change:+.2%})"
    numbers = [row["cosine"] for row in result["outputs"].values() if row["cosine"] is not None]
    worst = min((number for number in numbers if not isinstance(number, str)), default=None)
    return "" if worst is None else f"cosine with PyTorch {worst:.6f}"


def judged_lines(targets: list[dict[str, Any]]) -> list[str]:
    """What each precision but fp32 was compared with, said once each."""
    lines: dict[str, None] = {}
    for target in targets:
        tolerance = target["tolerance"]
        if target["precision"] != "fp32" and "words" in tolerance:
            lines[
                f"{target['precision']} answers are compared with {tolerance['reference']}, allowed"
                f" is {tolerance['words']}"
            ] = None
    return list(lines)
