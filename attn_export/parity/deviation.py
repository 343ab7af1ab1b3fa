"""How far one value inside a graph is from what it should be, and how far it may be.

The rule is that of outputs (tolerance.py): FACTOR times the error that float32 makes at that value,
but no less than FLOOR * eps(dtype) * rms. In 16 bits the error of float32 counts as many times as
their eps is larger.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attn_export.parity.compare import compare
from attn_export.parity.flow import Place
from attn_export.parity.tolerance import FACTOR, FLOOR, Array
from attn_export.parity.trace import Expected


@dataclass(frozen=True)
class Deviation:
    """One value of a graph on a runtime, next to what it should be.

    Attributes:
        error: largest absolute difference where it was compared; infinity where one is not finite.
        where: index of the worst element; None where nothing differs.
        got, expected: that element on the runtime, and as it should be.
        largest: magnitude that the whole value should reach.
        limit: largest number of the value's dtype; infinity for integers.
    """

    value: str
    place: Place
    dtype: str
    error: float
    allowed: float
    where: tuple[int, ...] | None
    got: float
    expected: float
    largest: float
    limit: float

    @property
    def drifts(self) -> bool:
        return not self.error <= self.allowed

    @property
    def overflows(self) -> bool:
        """Whether what it should hold is beyond its dtype."""
        return self.largest > self.limit

    def __str__(self) -> str:
        if self.where is None:
            return f"'{self.value}' is right"
        at = list(self.where)
        if np.isfinite(self.error):
            text = f"'{self.value}' is off by {self.error:.3g} at {at}, {self.allowed:.3g} allowed"
        else:
            text = f"'{self.value}' is {self.got:g} at {at}, where {self.expected:.4g} is right"
        if self.overflows:
            text += f"; it reaches {self.largest:.3g} and {self.dtype} ends at {self.limit:.5g}"
        return text


def allowed(expected: Expected, dtype: np.dtype[np.generic]) -> float:
    """The largest absolute difference of a value in `dtype`."""
    if expected.exact or dtype.kind != "f":
        return 0.0
    eps = float(np.finfo(dtype.name).eps)
    wider = max(1.0, eps / float(np.finfo(np.float32).eps))
    return max(FACTOR * wider * expected.error, FLOOR * eps * expected.rms)


def deviation(value: str, place: Place, actual: Array, expected: Expected) -> Deviation | None:
    """Compare a value; None where nothing can be said: another shape or kind, nothing finite."""
    kinds = "biu" if expected.exact else "f"
    if actual.shape != expected.shape or actual.dtype.kind not in kinds or not actual.size:
        return None
    if not np.isfinite(expected.samples).any():
        return None
    places = expected.places
    part = np.asarray(actual.ravel()[places], np.float64)
    budget = allowed(expected, actual.dtype)
    (found,) = compare(value, part, expected.samples, {"all": budget})
    worst = 0 if found.where is None else found.where[0]
    at = np.unravel_index(int(places[worst]), actual.shape)
    return Deviation(
        value=value,
        place=place,
        dtype=actual.dtype.name,
        error=found.max_abs,
        allowed=budget,
        where=None if found.where is None else tuple(map(int, at)),
        got=float(part[worst]),
        expected=float(expected.samples[worst]),
        largest=expected.largest,
        limit=float(np.finfo(actual.dtype.name).max) if actual.dtype.kind == "f" else float("inf"),
    )
