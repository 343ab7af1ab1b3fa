"""Positions and orders that rounding may decide: argmax, top-k, rows sorted by score. Numpy alone.

Two scores tie where they differ by no more than twice the error that each of them is allowed: a
runtime that is right may see either of them first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from attn_export.parity.tolerance import Array


def settle_index(
    found: Array, reference: Array, scores: Array, axis: int, tie: float
) -> tuple[Array, str]:
    """`found` with the reference's position wherever the two point at scores that tie.

    Args:
        found, reference: positions, of the shape of `scores` without `axis`, or with K entries
            on it (top-k).
        scores: the reference's.

    Returns the positions, and what is wrong with the shapes in words. A position that comes twice
    where the reference's differ is not settled.
    """
    if not -scores.ndim <= axis < scores.ndim:
        return found, f"its scores {scores.shape} have no axis {axis}"
    last = np.moveaxis(scores, axis, -1).astype(np.float64)
    dropped = reference.ndim == scores.ndim - 1
    mine, theirs = (a[..., None] if dropped else _last(a, axis) for a in (found, reference))
    if mine.shape != theirs.shape or theirs.shape[:-1] != last.shape[:-1]:
        return found, f"positions {reference.shape} do not fit scores {scores.shape}"
    mine_int = mine.astype(np.int64)
    inside = (mine_int >= 0) & (mine_int < last.shape[-1])
    at = [np.take_along_axis(last, np.where(inside, a, 0).astype(np.int64), -1)
          for a in (mine, theirs)]  # fmt: skip
    with np.errstate(invalid="ignore"):
        settled = inside & (np.abs(at[0] - at[1]) <= tie) & ~_repeated(mine)
    result = np.where(settled, theirs, mine).astype(found.dtype)
    return result[..., 0] if dropped else np.moveaxis(result, -1, axis), ""


def _last(array: Array, axis: int) -> Array:
    return np.moveaxis(array, axis, -1) if -array.ndim <= axis < array.ndim else array


def _repeated(rows: Array) -> NDArray[np.bool_]:
    """Where an entry of the last axis equals another one."""
    return np.asarray((rows[..., :, None] == rows[..., None, :]).sum(-1) > 1)


def settle_order(
    found: Mapping[str, Array],
    reference: Mapping[str, Array],
    scores: str,
    allowed: Mapping[str, float],
) -> dict[str, Array]:
    """Outputs (B, K, ...) with their rows in the reference's order, where scores tie.

    A row may take the place of one whose score ties with its own. A row that the reference cut off
    at the end of its list may stand for one that ties with the list's last score.

    Args:
        scores: the output (B, K) by which all of them are sorted; one of `found`.
        allowed: the allowed error of each.
    """
    names = [name for name in reference if name in found]
    shapes_differ = any(found[n].shape != reference[n].shape for n in names)
    if scores not in names or shapes_differ or reference[scores].ndim != 2:
        return dict(found)
    tie = 2 * allowed[scores]
    result = {name: np.array(array) for name, array in found.items()}
    for image, wanted in enumerate(np.asarray(reference[scores], np.float64)):
        mine = np.asarray(found[scores][image], np.float64)
        order = _order(
            wanted, mine, tie, [_distances(found[n][image], reference[n][image], allowed[n])
                                for n in names if n != scores],
        )  # fmt: skip
        for row, partner in enumerate(order):
            for name in names:
                taken = reference[name][image, row] if partner is None else (
                    found[name][image, partner])  # fmt: skip
                result[name][image, row] = taken
    return result


def _order(
    wanted: NDArray[np.float64],
    mine: NDArray[np.float64],
    tie: float,
    costs: Sequence[NDArray[np.float64]],
) -> list[int | None]:
    """For each reference row the row that stands for it; None where it was pushed off the end."""
    cost = np.sum(costs, axis=0) if len(costs) else np.zeros((len(wanted), len(mine)))
    free = np.ones(len(mine), dtype=bool)
    order: list[int | None] = [-1] * len(wanted)
    fits = np.abs(wanted[:, None] - mine[None, :]) <= tie
    fits &= np.abs(wanted[:, None] - wanted[None, :]) <= tie  # or an unsorted list would be sorted
    for row in range(len(wanted)):  # those that fit wholly first, so that none is taken away
        whole = np.flatnonzero(free & fits[row] & (cost[row] == 0))
        if whole.size:
            order[row] = int(whole[0])
            free[whole[0]] = False
    left = np.flatnonzero(free)
    for row in [row for row, partner in enumerate(order) if partner == -1]:
        partner, left = int(left[0]), left[1:]
        ends = wanted[row] - wanted[-1] <= tie and mine[partner] - wanted[-1] <= tie
        order[row] = None if ends and fits[row, partner] else partner
    return order


def _distances(found: Array, reference: Array, allowed: float) -> NDArray[np.float64]:
    """(K, K): 0 where row j of `found` is row i of `reference` within its allowed error, else 1."""
    a = np.asarray(found, np.float64).reshape(len(found), -1)
    r = np.asarray(reference, np.float64).reshape(len(reference), -1)
    with np.errstate(invalid="ignore"):
        same = (np.abs(r[:, None] - a) <= allowed) | (r[:, None] == a)
    same |= np.isnan(r[:, None]) & np.isnan(a)
    return np.asarray(1.0 - same.all(axis=-1))
