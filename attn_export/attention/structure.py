"""What a mask's own subgraph allows, found by running it at many sizes, not by its look.

A mask that is made of weights and sizes alone is the same for every input, so that it can be run
by itself. One that is made from integer or boolean inputs as well is run on several draws of them:
if none of these ever lets a query see a later key, the mask is causal at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from attn_export import right_padded
from attn_export.attention.cutting import cut, evaluate_cut, shape_lenders
from attn_export.attention.data import inputs_behind, numbers_of, walk
from attn_export.attention.masks import BLOCKING
from attn_export.attention.padding import declared
from attn_export.attention.site import Causal, Size
from attn_export.attention.sizes import evaluate, size_of

SMALL = ((2, 3, 5, 7, 4), (1, 6, 2, 3, 5), (9, 4, 8, 5, 6), (12, 13, 11, 6, 9))
"""Sizes for up to five symbols, one row a run; further symbols begin again."""

UNBOUNDED = 1 << 30
"""A number from here on stands for no end, as in a slice."""

LARGEST = 8192
"""Tokens up to which a mask is run to see a window whose size is one of its constants."""


@dataclass(frozen=True)
class Structure:
    """What a mask allows.

    Attributes:
        causal: how the last key that a query sees is counted; "none" where it sees later ones.
        window: how many keys a query sees at most, itself included; None where all before it.
        exact: whether the mask is this and nothing more, for every input.
        bias: whether it adds other numbers to scores than 0 and those that block.
        padding: the input, declared right padded, whose rows' lengths and `causal` are all that the
            mask says.
    """

    causal: Causal
    window: int | None
    exact: bool
    bias: bool
    padding: ir.Value | None = None


UNKNOWN = Structure("unknown", None, False, False)


def structure(model: ir.Model, mask: ir.Value, tokens: tuple[Size, Size]) -> Structure:
    """The structure of a dense mask that broadcasts to (..., S, T); UNKNOWN where it has none."""
    behind = inputs_behind(mask)
    if any(value.dtype is None or value.dtype.is_floating_point() for value in behind):
        return UNKNOWN
    try:
        runs = list(_runs(model, mask, behind, tokens))
    except (ValueError, OverflowError, MemoryError):  # it cannot be cut out, or does not run
        return UNKNOWN
    if not runs:
        return UNKNOWN
    aligned = [c for c in _ALIGNED if all(_within(run.allowed, c) for run in runs)]
    biased = any(run.biased for run in runs)
    causal = aligned[0] if aligned else "none"
    padded = not biased and all(_is_padding(run, causal) for run in runs)
    padding = behind[0] if padded else None
    if causal == "none":
        return Structure("none", None, False, biased, padding)
    widths = [(_width(r.allowed, causal), _width(np.ones_like(r.allowed), causal)) for r in runs]
    narrower = any(width < whole for width, whole in widths)
    limit = max(width for width, _ in widths) if narrower else None
    exact = not behind and not biased and all(_is(r.allowed, causal, limit) for r in runs)
    return Structure(causal, limit if exact else None, exact, biased, padding)


@dataclass(frozen=True)
class _Run:
    """What a mask allows at some sizes (..., S, T), and whether it adds other numbers.

    Attributes:
        lengths: of the rows of the one input behind it, if that is declared right padded.
    """

    allowed: NDArray[np.bool_]
    biased: bool
    lengths: NDArray[np.int64] | None


_ALIGNED: tuple[Causal, ...] = ("upper-left", "lower-right")


def _runs(
    model: ir.Model, mask: ir.Value, behind: list[ir.Value], tokens: tuple[Size, Size]
) -> list[_Run]:
    """What the mask allows at several sizes."""
    lenders = shape_lenders([mask], behind)
    bounds = [*behind, *lenders]
    evaluator = ReferenceEvaluator(cut(model, bounds, [mask]))
    symbols = sorted({s for value in bounds for s in _symbols(value)} | set(_named(tokens)))
    largest = _largest_constant(mask) if not behind else 0
    if largest > LARGEST and symbols:
        raise ValueError("a window may lie beyond what is run")
    bindings = [dict(zip(symbols, _row(row, len(symbols)), strict=True)) for row in SMALL]
    if symbols and largest > max(map(max, SMALL)):
        bindings.append(dict.fromkeys(symbols, largest + 3))
    if not symbols:
        bindings = [{} for _ in bindings]
    draws = [(bindings[0], 1.0)]
    if behind:  # all of either number, whichever of them blocks, and then some of both
        draws += [(bindings[0], 0.0), *((binding, 0.5) for binding in bindings)]
    elif symbols:
        draws += [(binding, 1.0) for binding in bindings[1:]]
    found = []
    for seed, (binding, ones) in enumerate(draws):
        inputs, lengths = _draw(bounds, behind, binding, seed, ones)
        query, key = (evaluate(size, binding) for size in tokens)
        allowed, biased = _allowed(np.asarray(evaluate_cut(evaluator, inputs)[0]))
        shape = np.broadcast_shapes(allowed.shape, (query, key))
        found.append(_Run(np.broadcast_to(allowed, shape), biased, lengths))
    return found


def _row(row: tuple[int, ...], count: int) -> list[int]:
    return [row[index % len(row)] for index in range(count)]


def _draw(
    bounds: list[ir.Value],
    behind: list[ir.Value],
    binding: Mapping[str, int],
    seed: int,
    ones: float,
) -> tuple[dict[str, NDArray[np.generic]], NDArray[np.int64] | None]:
    """Inputs, and the lengths of the one that the mask is made from, if it is right padded.

    Args:
        ones: how often the inputs behind the mask are 1, and not 0.
    """
    rng = np.random.default_rng(seed)
    drawn: dict[str, NDArray[np.generic]] = {}
    lengths = None
    for index, value in enumerate(bounds):
        shape = tuple(evaluate(size, binding) for size in value.shape or ())
        dtype = np.dtype(np.float32) if value.dtype is None else value.dtype.numpy()
        if index >= len(behind):  # lenders lend their sizes alone
            drawn[f"input_{index}"] = np.broadcast_to(dtype.type(1), shape)
            continue
        numbers = (rng.random(shape) < ones).astype(np.int64)
        if (keeps := declared(value)) is not None:
            numbers, rows = right_padded.drawn(rng, shape, keeps)
            lengths = rows if len(behind) == 1 else None
        drawn[f"input_{index}"] = np.asarray(numbers).astype(dtype)
    return drawn, lengths


def _symbols(value: ir.Value) -> set[str]:
    if value.shape is None:
        raise ValueError(f"the rank of '{value.name}' is unknown")
    return set(_named(tuple(s if isinstance(s, int) else str(s.value) for s in value.shape)))


def _named(sizes: tuple[Size, ...]) -> list[str]:
    found = [size_of(size) for size in sizes if isinstance(size, str)]
    return [
        symbol.name for size in found if not isinstance(size, int) for symbol in size.free_symbols
    ]


def _largest_constant(mask: ir.Value) -> int:
    """The largest whole number, or table, among the constants that a mask is made of."""
    largest = 0
    for value in walk([mask], numbers_of):
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None:
            array = tensor.numpy()
            largest = max([largest, *array.shape])
            number = float(array.reshape(-1)[0]) if array.size == 1 else 0.0
            if BLOCKING < number < UNBOUNDED:
                largest = max(largest, int(abs(number)))
    return largest


def _allowed(mask: NDArray[np.generic]) -> tuple[NDArray[np.bool_], bool]:
    if mask.dtype == np.bool_:
        return mask.astype(np.bool_), False
    allowed = np.greater(mask, BLOCKING)
    return allowed, bool((allowed & (mask != 0)).any())


def _offset(allowed: NDArray[np.bool_], causal: Causal) -> NDArray[np.int64]:
    """How far each key lies before the last one that a causal query sees, (S, T)."""
    queries, keys = allowed.shape[-2:]
    last = np.arange(queries)[:, None] + (keys - queries if causal == "lower-right" else 0)
    return last - np.arange(keys)


def _within(allowed: NDArray[np.bool_], causal: Causal) -> bool:
    return not allowed[..., _offset(allowed, causal) < 0].any()


def _is_padding(run: _Run, causal: Causal) -> bool:
    """Whether each row sees so many first keys, as far as `causal` lets its queries."""
    shape = run.allowed.shape
    if run.lengths is None or len(shape) != 4 or shape[0] != len(run.lengths):
        return False  # the first axis of a mask of 3 is its heads
    inside = np.arange(shape[-1]) < run.lengths[:, None, None, None]
    if causal != "none":
        inside = inside & (_offset(run.allowed, causal) >= 0)
    return bool((run.allowed == inside).all())


def _width(allowed: NDArray[np.bool_], causal: Causal) -> int:
    """How many keys, from the last that it may see on, reach to the first that any query sees."""
    seen = allowed.reshape(-1, *allowed.shape[-2:]).any(axis=0)
    return int(_offset(allowed, causal)[seen].max(initial=0)) + 1


def _is(allowed: NDArray[np.bool_], causal: Causal, window: int | None) -> bool:
    offset = _offset(allowed, causal)
    inside = (offset >= 0) & (True if window is None else offset < window)
    return bool((allowed == inside).all())
