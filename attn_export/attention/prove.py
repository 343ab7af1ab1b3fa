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

from attn_export.attention.cutting import (
    cut,
    double,
    evaluate_cut,
    evaluator,
    result_name,
    shape_lenders,
)
from attn_export.attention.hostile import MAGNITUDES, hostile
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.masks import may_block
from attn_export.parity.compare import compare
from attn_export.parity.tolerance import FACTOR, allowed_error, max_abs, rounded
from attn_export.protos import in_double, in_single
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import Arrays

WOBBLES = 4  # one draw may by chance move the truth less than roundings do


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
        magnitudes: of the inputs, as `hostile` takes them.
    """
    bounds = [
        *rewrite.inputs,
        *shape_lenders([v for pair in rewrite.pairs for v in pair], rewrite.inputs),
    ]
    before = cut(model, bounds, [old for old, _ in rewrite.pairs])
    after = cut(model, bounds, [new for _, new in rewrite.pairs])
    mask = rewrite.mask if rewrite.mask is not None and may_block(rewrite.mask) else None
    cases = (Trial(*case) for case in hostile(bounds, mask, sizes, magnitudes, brief))
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
