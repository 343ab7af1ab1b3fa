"""Compare a runtime's outputs with the reference's. This module needs numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attn_export.parity.tolerance import Array, Group, max_abs, rms, split


@dataclass(frozen=True)
class Comparison:
    """How one group of one output compares; errors are absolute unless named otherwise.

    Attributes:
        max_rel: largest absolute difference over the largest absolute reference.
        error_vs_truth, torch_error_vs_truth: largest absolute differences from the float64 truth,
            of the runtime and of the reference; None where there is no truth.
        mismatched: how many elements differ by more than is allowed, NaN against a number included.
        where: index of the worst element; None where nothing differs.
        problem: why it failed, in words; empty where it passed.
        sqnr_db: the reference's power over that of the difference, in decibels; infinite where
            nothing differs, NaN where a value is not finite.
        smallest_atol, smallest_rtol: the smallest --atol (with --rtol 0), and the smallest --rtol
            (with --atol 0), that would pass; infinite where none does.
        excluded: elements at masked positions, which were not looked at.
    """

    output: str
    group: str
    max_abs: float
    max_rel: float
    mean_abs: float
    cosine: float
    error_vs_truth: float | None
    torch_error_vs_truth: float | None
    allowed: float
    mismatched: int
    elements: int
    where: tuple[int, ...] | None
    problem: str
    sqnr_db: float = float("nan")
    smallest_atol: float = float("inf")
    smallest_rtol: float = float("inf")
    excluded: int = 0

    @property
    def passed(self) -> bool:
        return not self.problem


def failed(output: str, problem: str) -> Comparison:
    """An output that cannot even be compared: missing, extra, another shape or dtype."""
    nan = float("nan")
    return Comparison(output, "all", nan, nan, nan, nan, None, None, nan, 0, 0, None, problem)


def compare(
    output: str,
    actual: Array,
    reference: Array,
    allowed: Mapping[str, float],
    truth: Array | None = None,
    groups: Sequence[Group] = (),
    keep: NDArray[np.bool_] | None = None,
) -> list[Comparison]:
    """Compare one output, group by group.

    Args:
        actual, reference: the runtime's and the reference's values, of one dtype and shape.
        allowed: largest absolute error by group name ("all" for an output without groups).
        truth: float64, same shape.
        keep: the positions (B, S) of an output (B, S, ...) that count; all by default.
    """
    if actual.shape != reference.shape:
        return [
            failed(output, f"its shape is {actual.shape}, the reference's is {reference.shape}")
        ]
    if actual.dtype != reference.dtype:
        return [
            failed(output, f"its dtype is {actual.dtype}, the reference's is {reference.dtype}")
        ]
    if reference.size == 0:
        return [failed(output, "it is empty, so nothing was compared")]
    if keep is not None and keep.shape != reference.shape[:2]:
        problem = f"its shape is {reference.shape}, which a mask {keep.shape} does not fit"
        return [failed(output, problem)]
    if keep is not None and not keep.any():
        return [failed(output, "every position is masked, so nothing was compared")]
    truths = {} if truth is None else split(truth, groups)
    actuals = split(actual, groups)
    return [
        _compare_group(output, name, actuals[name], part, allowed[name], truths.get(name), keep)
        for name, part in split(reference, groups).items()
    ]


def compare_outputs(
    actual: Mapping[str, Array],
    reference: Mapping[str, Array],
    allowed: Mapping[str, Mapping[str, float]],
    truth: Mapping[str, Array],
    groups: Mapping[str, Sequence[Group]],
    keep: Mapping[str, NDArray[np.bool_]] | None = None,
) -> list[Comparison]:
    """Compare every output of one run; a missing or an extra one fails."""
    kept = keep or {}
    results = [
        failed(name, "the reference has no such output") for name in actual if name not in reference
    ]
    for name, expected in reference.items():
        if name not in actual:
            results.append(failed(name, "the runtime did not return it"))
            continue
        results += compare(
            name, actual[name], expected, allowed[name], truth.get(name), groups.get(name, ()),
            kept.get(name),
        )  # fmt: skip
    return results


def _compare_group(
    output: str,
    group: str,
    actual: Array,
    reference: Array,
    allowed: float,
    truth: Array | None,
    keep: NDArray[np.bool_] | None,
) -> Comparison:
    mine, theirs = _chosen(actual, keep), _chosen(reference, keep)
    a, r = _as_float64(mine), _as_float64(theirs)
    difference = _difference(mine, theirs, a, r)
    worst = float(difference.max())
    within = (difference <= allowed) & np.isfinite(difference)  # an allowance of NaN allows nothing
    mismatched = int(np.count_nonzero(~within))
    largest = float(np.max(np.abs(r[np.isfinite(r)]), initial=0.0))
    where = _place(difference, keep) if worst > 0 else None
    t = None if truth is None else _as_float64(_chosen(truth, keep))
    scale = rms(r[np.isfinite(r)])
    return Comparison(
        output=output,
        group=group,
        max_abs=worst,
        max_rel=worst / largest if largest else (0.0 if worst == 0 else float("inf")),
        mean_abs=float(difference.mean()),
        cosine=cosine(a, r),
        error_vs_truth=None if t is None else max_abs(a, t),
        torch_error_vs_truth=None if t is None else max_abs(r, t),
        allowed=allowed,
        mismatched=mismatched,
        elements=difference.size,
        where=where,
        problem=_problem(a, r, difference, mismatched, allowed, where),
        sqnr_db=sqnr(a, r),
        smallest_atol=worst,
        smallest_rtol=worst / scale if scale else (0.0 if worst == 0 else float("inf")),
        excluded=reference.size - difference.size,
    )


def _chosen(array: Array, keep: NDArray[np.bool_] | None) -> Array:
    """The elements that count: all, or one row for each position that is kept."""
    return array if keep is None else array[keep]


def _place(difference: NDArray[np.float64], keep: NDArray[np.bool_] | None) -> tuple[int, ...]:
    """Index of the largest difference, in the output as it was before positions were left out."""
    index = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), difference.shape))
    return index if keep is None else (*(int(i) for i in np.argwhere(keep)[index[0]]), *index[1:])


def _difference(
    actual: Array, reference: Array, a: NDArray[np.float64], r: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Absolute differences; infinity for NaN or infinity against anything but itself."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(a - r)
    same = (actual == reference) | (np.isnan(a) & np.isnan(r))
    difference = np.where(np.isnan(difference), np.inf, difference)
    if reference.dtype.kind in "biu":
        difference = np.maximum(difference, 1.0)  # float64 cannot tell 2**53 from 2**53 + 1
    return np.where(same, 0.0, difference)


def _problem(
    a: NDArray[np.float64],
    r: NDArray[np.float64],
    difference: NDArray[np.float64],
    mismatched: int,
    allowed: float,
    where: tuple[int, ...] | None,
) -> str:
    if not np.isfinite(r).any():
        return "the reference itself has no finite number, so there is nothing to compare with"
    if mismatched == 0:
        return ""
    if where is None:
        return f"its allowed error is {allowed}, so nothing can pass"
    place, worst = list(where), float(difference.max())
    counted = f"{mismatched} of {a.size} elements"
    if not np.isfinite(worst):
        at = int(difference.argmax())
        return f"{counted} differ, worst {a.flat[at]} against {r.flat[at]} at {place}"
    return f"{counted} differ by more than {allowed:.3g}, worst {worst:.3g} at {place}"


def sqnr(a: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Signal to quantisation noise ratio in decibels: power of the reference over the error's.

    Infinite for equal arrays, minus infinite for an error of a reference of zeros, NaN where a
    value is not finite.
    """
    if not (np.isfinite(a).all() and np.isfinite(reference).all()):
        return float("nan")
    noise, signal = rms((a - reference).ravel()), rms(reference.ravel())
    if noise == 0.0:
        return float("inf")
    return 20 * float(np.log10(signal / noise)) if signal else float("-inf")


def cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Cosine similarity; 1 for two zero arrays, NaN where a value is not finite."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    if norms == 0.0:
        return 1.0 if not (a.any() or b.any()) else 0.0
    return float(np.vdot(a, b)) / norms


def _as_float64(array: Array) -> NDArray[np.float64]:
    return np.asarray(array, dtype=np.float64)
