"""How much error is allowed, derived from the truth instead of guessed.

For one group of one output (boxes and scores of a detector are groups of their own):

    allowed = max(FACTOR * error of the reference, FLOOR * eps(dtype) * rms(truth))

The first term is PyTorch's own rounding error against the float64 truth, measured; the second
keeps a reference that happens to be exact from demanding the impossible. Both scale with the
output, so that the same two constants serve logits of 1e-3 and of 1e3. Errors are the largest
absolute difference over the group. This module needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

FACTOR = 8.0
FLOOR = 64.0
HALF_FLOOR = 8.0  # 64 roundings of float16 would be 6 % of the output, far above what is seen

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Group:
    """The slice [start, stop) of one axis of an output, judged on its own scale."""

    name: str
    axis: int
    start: int
    stop: int


def split(array: Array, groups: Sequence[Group]) -> dict[str, Array]:
    """An output's groups by name; an output without groups is one, named "all".

    Raises:
        ValueError: a group lies outside of the array, or an element is in no group or in two.
    """
    if not groups:
        return {"all": array}
    parts: dict[str, Array] = {}
    for group in groups:
        if not -array.ndim <= group.axis < array.ndim or group.stop > array.shape[group.axis]:
            raise ValueError(f"group {group.name} lies outside of shape {array.shape}")
        index: list[slice] = [slice(None)] * array.ndim
        index[group.axis] = slice(group.start, group.stop)
        parts[group.name] = array[tuple(index)]
    if not _tiles(array, groups) or len(parts) != len(groups):
        names = ", ".join(group.name for group in groups)
        raise ValueError(f"groups {names} do not cover shape {array.shape} exactly once")
    return parts


def _tiles(array: Array, groups: Sequence[Group]) -> bool:
    """Whether the groups follow one another on one axis, from its start to its end."""
    axes = {group.axis % array.ndim for group in groups}
    starts, stops = zip(*sorted((group.start, group.stop) for group in groups), strict=True)
    return (
        len(axes) == 1
        and starts == (0, *stops[:-1])
        and stops[-1] == array.shape[axes.pop()]
        and all(group.start < group.stop for group in groups)
    )


def allowed_error(
    reference: Array, truth: Array | None, *, dtype: DTypeLike | None = None, floor: float = FLOOR
) -> float:
    """The largest absolute difference from `reference` that still counts as its answer.

    Args:
        reference: what PyTorch computed, in the precision that is judged.
        truth: the same in float64; None where it could not be computed, and then only the floor
            applies, with the reference itself for its scale.
        dtype: what the reference was computed in, where that is not the dtype it is stored in.
        floor: how many roundings of that dtype are always allowed.

    Integers and booleans must be equal: 0.
    """
    if reference.dtype.kind in "biu":
        return 0.0
    eps = epsilon(reference.dtype if dtype is None else dtype)
    scale = np.asarray(reference if truth is None else truth, dtype=np.float64)
    finite = scale[np.isfinite(scale)]
    least = floor * eps * rms(finite)
    if truth is None:
        return least
    return max(FACTOR * max_abs(np.asarray(reference, np.float64), scale), least)


def epsilon(dtype: DTypeLike) -> float:
    """The spacing of numbers at 1; of bfloat16, which numpy alone does not have, too."""
    if str(dtype) == "bfloat16":
        return 2.0**-7
    return float(np.finfo(np.dtype(dtype)).eps)


def rounded(array: Array, dtype: DTypeLike, seed: int) -> Array:
    """Each number moved by one rounding of `dtype`, up or down; float64. Integers stay as they are.

    How far an answer moves with it is how well its inputs, as they are stored, decide it.
    """
    if array.dtype.kind != "f":
        return array
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], array.shape)
    return np.asarray(array, np.float64) * (1 + float(np.finfo(dtype).eps) * signs)


def rms(values: NDArray[np.float64]) -> float:
    """Root mean square, without overflow; 0 of nothing."""
    largest = float(np.max(np.abs(values), initial=0.0))
    return largest * float(np.sqrt(np.mean(np.square(values / largest)))) if largest else 0.0


def max_abs(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The largest absolute difference where both are finite; 0 where there is nothing."""
    both = np.isfinite(a) & np.isfinite(b)
    return float(np.max(np.abs(a[both] - b[both]))) if both.any() else 0.0
