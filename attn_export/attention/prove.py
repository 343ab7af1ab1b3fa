"""Run a rewrite and what it replaces on hostile inputs, and compare both with float64.

The site is cut out of the graph at the values where its rewrite begins, with every node that is
replaced and every weight that is merged. The truth is the cut-out in double on ONNX's reference
evaluator. The yardstick is the error of the same nodes there in their own precision, and how far
the truth moves when its inputs move by one rounding: large scores magnify roundings, whoever
computes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from attn_export import right_padded
from attn_export.attention.cutting import (
    cut,
    double,
    evaluate_cut,
    evaluator,
    result_name,
    shape_lenders,
)
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.masks import may_block
from attn_export.attention.padding import declared
from attn_export.attention.sizes import evaluate
from attn_export.parity.compare import compare
from attn_export.parity.tolerance import FACTOR, allowed_error, max_abs, rounded
from attn_export.protos import in_double, in_single
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import Arrays

WOBBLES = 4  # one draw may by chance move the truth less than roundings do
MAGNITUDES = (1.0, 1e-3, 30.0)  # ordinary, tiny and large scores


@dataclass(frozen=True)
class Proof:
    """Whether a rewrite computes what it replaces.

    Attributes:
        runs: how many inputs both sides agreed on.
        problem: the first disagreement, in words; empty where there was none.
        output: the index of the output that disagreed.
    """

    runs: int
    problem: str
    output: int = 0

    @property
    def held(self) -> bool:
        return self.runs > 0 and not self.problem


def prove(
    model: ir.Model,
    rewrite: Rewrite,
    sizes: Sequence[Mapping[str, int]],
    *,
    brief: bool = False,
    magnitudes: Sequence[float] = MAGNITUDES,
) -> Proof:
    """Run both sides. The rewrite's nodes must lie in the model's graph, not yet connected.

    Graphs in bfloat16 run in float32, since ONNX Runtime's CPU provider has no kernels for them.

    Args:
        sizes: values for the graph's symbolic sizes, one mapping a case.
        brief: one run only, for a site whose like was proved before: its own weights are checked.
        magnitudes: of the inputs, each at all sizes.
    """
    bounds = [
        *rewrite.inputs,
        *shape_lenders([v for pair in rewrite.pairs for v in pair], rewrite.inputs),
    ]
    before = cut(model, bounds, [old for old, _ in rewrite.pairs])
    after = cut(model, bounds, [new for _, new in rewrite.pairs])
    mask = rewrite.mask if rewrite.mask is not None and may_block(rewrite.mask) else None
    cases = (Trial(*case) for case in _hostile(bounds, mask, sizes, magnitudes, brief))
    return prove_parts(before, after, cases)


@dataclass(frozen=True)
class Trial:
    """Inputs for both sides.

    Attributes:
        keep: by index of an output (B, S, ...), its positions (B, S) that count; all of the others.
    """

    name: str
    inputs: Arrays
    keep: Mapping[int, NDArray[np.bool_]] = field(default_factory=dict)


def prove_parts(
    before: onnx.ModelProto,
    after: onnx.ModelProto,
    trials: Iterable[Trial],
    *,
    evaluated: bool = False,
) -> Proof:
    """Run two models, as `cut` names their inputs and outputs, and compare them.

    Args:
        evaluated: run the second one on ONNX's reference evaluator too, as it may have forms of
            operators that ONNX Runtime does not run, before it is lowered.
    """
    for part in (before, after):
        in_single(part)
    doubled_part = onnx.ModelProto()
    doubled_part.CopyFrom(before)
    in_double(doubled_part)
    runs = 0
    ran = _evaluated(after) if evaluated else ort_cpu.load(after.SerializeToString())
    with evaluator(before) as unchanged, evaluator(doubled_part) as truth, ran as fused:
        for trial in trials:
            doubled = {key: double(array) for key, array in trial.inputs.items()}
            exact = evaluate_cut(truth, doubled)
            results, reference = fused.run(trial.inputs), evaluate_cut(unchanged, trial.inputs)
            moved: list[list[NDArray[np.generic]]] = []
            output, problem = 0, "not compared"
            while problem and len(moved) < WOBBLES:
                wobbled = {key: rounded(a, np.float32, len(moved)) for key, a in doubled.items()}
                moved.append(evaluate_cut(truth, wobbled))
                output, problem = _differs(results, reference, exact, moved, trial.keep)
            if problem:
                return Proof(runs, f"{trial.name}: {problem}", output)
            runs += 1
    return Proof(runs, "")


class _Evaluated:
    """A session on ONNX's reference evaluator."""

    def __init__(self, model: ReferenceEvaluator) -> None:
        self._model = model

    def run(self, inputs: Arrays) -> Arrays:
        found = evaluate_cut(self._model, inputs)
        return {result_name(index): array for index, array in enumerate(found)}


@contextmanager
def _evaluated(part: onnx.ModelProto) -> Iterator[_Evaluated]:
    with evaluator(part) as model:
        yield _Evaluated(model)


def _differs(
    results: Mapping[str, NDArray[np.generic]],
    expected: Sequence[NDArray[np.generic]],
    exact: Sequence[NDArray[np.generic]],
    moved: Sequence[Sequence[NDArray[np.generic]]],
    keep: Mapping[int, NDArray[np.bool_]],
) -> tuple[int, str]:
    """The first output that differs by more than is allowed, and how; nothing where none does."""
    for index, (reference, truth) in enumerate(zip(expected, exact, strict=True)):
        kept = keep.get(index)
        double = np.asarray(truth, np.float64)
        draws = [np.asarray(draw[index], np.float64) for draw in moved]
        spread = max(max_abs(_counted(draw, kept), _counted(double, kept)) for draw in draws)
        own = allowed_error(_counted(reference, kept), _counted(double, kept))
        budget = {"all": max(own, FACTOR * spread)}
        name = result_name(index)
        (found,) = compare(name, results[name], reference, budget, double, keep=kept)
        if not found.passed:
            return index, found.problem
    return 0, ""


def _counted(array: NDArray[Any], keep: NDArray[np.bool_] | None) -> NDArray[Any]:
    return array if keep is None else array[keep]


def _hostile(
    values: Sequence[ir.Value],
    mask: ir.Value | None,
    sizes: Sequence[Mapping[str, int]],
    magnitudes: Sequence[float],
    brief: bool,
) -> Iterator[tuple[str, Arrays]]:
    for seed, binding in enumerate(sizes or [{}]):
        rng = np.random.default_rng(seed)
        for magnitude in magnitudes:
            inputs = {
                f"input_{index}": _draw(rng, value, binding, magnitude, value is mask)
                for index, value in enumerate(values)
            }
            where = " ".join(f"{name}={size}" for name, size in binding.items())
            yield f"inputs of size {magnitude:g}{' at ' + where if where else ''}", inputs
            if brief:
                return


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
