"""What a verification found: for each runtime, every comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attn_export.errors import CheckFailed
from attn_export.parity.compare import Comparison
from attn_export.parity.drift import Drift
from attn_export.precision.bounds import Checked


@dataclass(frozen=True)
class RuntimeResult:
    """How one runtime did.

    Attributes:
        comparisons: (case, comparison) of every group of every output of every case.
        metric: the bundle's task score on this runtime; None where the bundle has none, or where
            the answers are wrong anyway.
        precision: what the graphs are computed in.
        bounds: declared bounds, and what was found.
        stands_in_for: the runtime that the graph is for, where another one ran it.
        scores: `verify --metric` -> its value; how far the answers agree with the reference's.
        note: what was not compared, and why.
        fallback: attention that another provider ran, where that was allowed.
        drift: the first value inside of the graph that is wrong, where an output is.
        undrifted: why that was not found.
    """

    runtime: str
    comparisons: tuple[tuple[str, Comparison], ...]
    placement: Mapping[str, int]
    metric: float | None = None
    unscored: str = ""
    stands_in_for: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    fallback: str = ""
    drift: Drift | None = None
    undrifted: str = ""
    precision: str = "fp32"
    bounds: tuple[Checked, ...] = ()

    @property
    def passed(self) -> bool:
        judged = [c for _, c in self.comparisons]
        return bool(judged) and all(c.passed for c in judged) and self._bounds_hold

    @property
    def _bounds_hold(self) -> bool:
        return all(found.passed for found in self.bounds)

    @property
    def failures(self) -> list[str]:
        """One line for each comparison that failed."""
        if not self.comparisons:
            return ["nothing was compared"]
        told = [_told(case, c) for case, c in self.comparisons if not c.passed]
        return told + [found.problem for found in self.bounds if not found.passed]

    @property
    def worst_failure(self) -> str:
        """The failure that went furthest beyond its allowance: output, place and size."""
        failed = [(case, c) for case, c in self.comparisons if not c.passed]
        if not failed:
            return next((found.problem for found in self.bounds if not found.passed), "")
        return _told(*max(failed, key=lambda found: _strain(found[1])))

    def worst(self) -> dict[str, Comparison]:
        """For each output, the comparison that came closest to its allowance, or went furthest."""
        found: dict[str, Comparison] = {}
        for _, comparison in self.comparisons:
            before = found.get(comparison.output)
            if before is None or _strain(comparison) > _strain(before):
                found[comparison.output] = comparison
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "outputs": {name: _to_json(worst) for name, worst in self.worst().items()},
            "placement": dict(self.placement),
            "metric": self.metric,
            "unscored": self.unscored,
            "stands_in_for": self.stands_in_for,
            "metrics": {name: _finite(value) for name, value in self.scores.items()},
            "note": self.note,
            "fallback": self.fallback,
            "precision": self.precision,
            "bounds": [found.to_json() for found in self.bounds],
            "failures": self.failures if not self.passed else [],
            "first_drift": self.drift.to_json() if self.drift else None,
        }


def _told(case: str, c: Comparison) -> str:
    group = "" if c.group == "all" else f" ({c.group})"
    return f"{case}: output '{c.output}'{group}: {c.problem}"


def _strain(comparison: Comparison) -> float:
    if not comparison.passed:
        return float("inf") if np.isnan(comparison.max_abs) else 1e9 + comparison.max_abs
    return comparison.max_abs / comparison.allowed if comparison.allowed else 0.0


def _to_json(comparison: Comparison) -> dict[str, Any]:
    keys = ("group", "max_abs", "max_rel", "mean_abs", "cosine", "error_vs_truth",
            "torch_error_vs_truth", "allowed", "sqnr_db", "smallest_atol", "smallest_rtol",
            "mismatched", "elements", "excluded", "passed")  # fmt: skip
    figures = {key: _finite(getattr(comparison, key)) for key in keys}
    return figures | {"where": None if comparison.where is None else list(comparison.where)}


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become strings."""
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: one RuntimeResult for each runtime.

    Attributes:
        unavailable: runtimes of the bundle that cannot work here -> what was seen, and the way out.
        reference: whose answers these are compared with, in words.
        against: the source that was named for them; None for those that the bundle stores.
        seed: what the cases were drawn with; None where a bundle does not say.
        notes: what was left out or assumed when the cases were drawn.
        masked: output -> the input that says which of its positions count.
    """

    cases: tuple[str, ...]
    runtimes: Mapping[str, RuntimeResult]
    metric: Mapping[str, Any] | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    reference: str = "PyTorch"
    against: str | None = None
    seed: int | None = None
    notes: tuple[str, ...] = ()
    masked: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.runtimes) and all(result.passed for result in self.runtimes.values())

    def require(self) -> None:
        """Raise CheckFailed with the worst difference, unless every runtime passed."""
        if not self.runtimes:
            raise CheckFailed("nothing was compared", "name a runtime that works here")
        for name, result in self.runtimes.items():
            if not result.passed:
                failures = len(result.failures)
                others = f" ({failures} comparisons failed, this is the worst)" * (failures > 1)
                raise CheckFailed(
                    f"{name} differs from {self.reference}, {result.worst_failure}{others}",
                    "do not deploy it",
                )

    def to_json(self) -> dict[str, Any]:
        """The `verify --json` object."""
        return {
            "cases": list(self.cases),
            "runtimes": {name: result.to_json() for name, result in self.runtimes.items()},
            "metric": dict(self.metric) if self.metric else None,
            "unavailable": dict(self.unavailable),
            "reference": self.reference,
            "against": self.against,
            "seed": self.seed,
            "notes": list(self.notes),
            "masked": dict(self.masked),
            "passed": self.passed,
        }
