"""Inputs on which a wrong rewrite shows itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export import right_padded
from attn_export.attention.padding import declared
from attn_export.attention.sizes import evaluate
from attn_export.runtimes.base import Arrays

Binding = Mapping[str, int]
MAGNITUDES = (1.0, 1e-3, 30.0)  # ordinary, tiny and large scores
MANY_SCORES = 4_000_000  # rows x tokens^2: beyond it one case takes float64 seconds


def hostile(
    values: Sequence[ir.Value],
    mask: ir.Value | None,
    sizes: Sequence[Binding],
    magnitudes: Sequence[float] = MAGNITUDES,
    brief: bool = False,
) -> Iterator[tuple[str, Arrays]]:
    """Each case's name and its inputs, `input_0` and on for `values`.

    Every magnitude at all sizes; where there are very many scores, at the smallest sizes, and the
    first magnitude at the largest.

    Args:
        mask: the one of `values` that blocks by its numbers.
        sizes: values for the symbolic sizes, one mapping a case.
        brief: the first case only.

    Raises:
        ValueError: a size is not known.
    """
    cases = _cases(values, list(sizes) or [{}], magnitudes)
    drawing: dict[int, np.random.Generator] = {}
    for seed, binding, magnitude in cases[:1] if brief else cases:
        rng = drawing.setdefault(seed, np.random.default_rng(seed))
        inputs = {
            f"input_{index}": _draw(rng, value, binding, magnitude, value is mask)
            for index, value in enumerate(values)
        }
        where = " ".join(f"{name}={size}" for name, size in binding.items())
        yield f"inputs of size {magnitude:g}{' at ' + where if where else ''}", inputs


def _cases(
    values: Sequence[ir.Value], sizes: Sequence[Binding], magnitudes: Sequence[float]
) -> list[tuple[int, Binding, float]]:
    """Seed, sizes and magnitude of each."""
    every = [(s, binding, m) for s, binding in enumerate(sizes) for m in magnitudes]
    scores = [max((_scores(value, binding) for value in values), default=0) for binding in sizes]
    if max(scores) <= MANY_SCORES:
        return every
    smallest, largest = scores.index(min(scores)), scores.index(max(scores))
    kept = [case for case in every if case[0] == smallest]
    return kept if largest == smallest else [*kept, (largest, sizes[largest], magnitudes[0])]


def _scores(value: ir.Value, binding: Binding) -> int:
    """Rows times the square of the longest axis between the first and the last."""
    shape = _concrete(value, binding)
    return shape[0] * max(shape[1:-1]) ** 2 if len(shape) > 2 else 0


def _draw(
    rng: np.random.Generator,
    value: ir.Value,
    binding: Mapping[str, int],
    magnitude: float,
    is_mask: bool,
) -> NDArray[np.generic]:
    shape = _concrete(value, binding)
    keeps = declared(value)
    dtype = np.dtype(np.float32)
    if value.dtype not in (None, ir.DataType.BFLOAT16):
        dtype = value.dtype.numpy()
    if keeps is not None:
        return right_padded.drawn(rng, shape, keeps)[0].astype(dtype)
    if dtype.kind in "biu":  # zeros and ones are what a mask is made from
        return _hostile_mask(rng, shape).astype(dtype)
    drawn = (rng.standard_normal(shape) * magnitude).astype(dtype)
    if is_mask and dtype.kind == "f":
        lowest = np.array([-np.inf, np.finfo(dtype).min], dtype=dtype)
        # Whole queries are blocked by either number, as the ways to write a mask do.
        fill = np.broadcast_to(lowest[rng.integers(0, 2, (*shape[:-1], 1))], shape)
        drawn = np.where(_hostile_mask(rng, shape), drawn, fill)
    return np.asarray(drawn)


def _hostile_mask(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """True allows: holes, left and right padding, and queries that may see no key."""
    allowed = rng.random(shape) > 0.3
    rows = allowed.reshape(-1, shape[-1]) if shape else allowed.reshape(1, 1)
    half = (rows.shape[1] + 1) // 2
    for index, row in enumerate(rows):
        if index % 4 == 1:
            row[:] = False
        elif index % 4 == 2:
            row[: half - 1] = False
        elif index % 4 == 3:
            row[half:] = False
    return allowed


def _concrete(value: ir.Value, binding: Mapping[str, int]) -> tuple[int, ...]:
    if value.shape is None:
        raise ValueError(f"the rank of '{value.name}' is unknown")
    return tuple(evaluate(size, binding) for size in value.shape)
