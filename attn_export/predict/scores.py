"""Logits -> scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def activate(values: Floats, kind: str) -> Floats:
    """Softmax over the last axis, sigmoid, or the values as they are; float64."""
    if kind == "softmax":
        powers = np.exp(values - values.max(axis=-1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
    if kind == "sigmoid":
        # exp of a negative number alone, which does not overflow
        power = np.exp(-np.abs(values))
        return np.asarray(np.where(values >= 0, 1.0, power) / (1.0 + power))
    return values.copy()
