"""Bilinear interpolation of two by two pixels, whatever the scale: what OpenCV calls linear.

Weights are kept in 11 bits as OpenCV keeps them for 8-bit images; answers are within one level of
its own, whose vector code rounds once more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BITS = 11


def linear(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Pixels uint8 (H, W) or (H, W, C) at another height and width; pixel centres lie at .5."""
    y0, y1, down = _taps(pixels.shape[0], size[0])
    x0, x1, across = _taps(pixels.shape[1], size[1])
    wide = pixels.astype(np.int64)
    extra = (1,) * (pixels.ndim - 2)
    across, down = across.reshape((1, -1, *extra)), down.reshape((-1, 1, *extra))
    one = 1 << BITS
    rows: NDArray[np.int64] = wide[:, x0] * (one - across) + wide[:, x1] * across
    mixed: NDArray[np.int64] = rows[y0] * (one - down) + rows[y1] * down
    half = np.int64(1 << (2 * BITS - 1))
    levels: NDArray[np.uint8] = np.right_shift(mixed + half, 2 * BITS).astype(np.uint8)
    return levels


def _taps(old: int, new: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The two source pixels of each new one, and the weight of the second."""
    place = (np.arange(new) + 0.5) * (old / new) - 0.5
    first = np.floor(place)
    weight = np.where((first >= 0) & (first < old - 1), place - first, 0.0)
    low = np.clip(first, 0, old - 1).astype(np.int64)
    high = np.minimum(low + 1, old - 1)
    return low, high, np.rint(weight * (1 << BITS)).astype(np.int64)
