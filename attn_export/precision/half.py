"""A float16 or bfloat16 graph from the lowered float32 one.

1. The float32 graph runs on the stored cases; a plan is made from what its values reach.
2. The half graph runs on the same cases, each half result rounded. Where an output leaves its
   allowance, or is not finite, the node where that began stays float32 too, and the graph is made
   again.
3. The graph with the smallest excess is kept, with the list of nodes that stay float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attn_export.parity.compare import compare_outputs
from attn_export.parity.detections import align, score_allowance
from attn_export.parity.tolerance import Group
from attn_export.precision.convert import convert
from attn_export.precision.drift import find_drift
from attn_export.precision.magnitudes import loaded, magnitudes
from attn_export.precision.plan import Kept, make_plan
from attn_export.precision.stand_in import stand_in
from attn_export.reference import Case

ROUNDS = 16
DTYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class Half:
    """A half graph, the nodes that stay float32, and how far its outputs are off.

    Attributes:
        strain: the largest error over its allowance, in that run; infinity where
            something is not finite, 0 where nothing but being finite is asked.
    """

    model: ir.Model
    kept: tuple[Kept, ...]
    strain: float


def make_half(
    model: ir.Model,
    precision: str,
    runtime: str,
    cases: Sequence[Case],
    compare: Mapping[str, str],
    groups: Mapping[str, Sequence[Group]],
    half_io: Collection[str] = (),
) -> Half:
    """Convert a copy of the lowered graph.

    Args:
        cases: of this component, with their allowance where PyTorch's own run gave one.
        compare: output -> how it is compared, where not elementwise.
        half_io: inputs and outputs that become half as well.
    """
    dtype = DTYPES[precision]
    runs = [case.inputs for case in cases]
    seen = magnitudes(model, runs)
    drifting: dict[str, tuple[str, str]] = {}
    best: Half | None = None
    for _ in range(ROUNDS):
        made = model.clone()
        plan = make_plan(made, dtype, runtime, seen, drifting)
        kept = tuple(plan.kept.values())
        stays = {str(node.name) for node in (*plan.kept, *plan.between)}
        convert(made, plan, dtype, half_io)
        rounded = stand_in(made)
        strain = _strain(rounded, cases, precision, compare, groups)
        if best is None or strain < best.strain:
            best = Half(made, kept, strain)
        if strain <= 1:
            break
        found = find_drift(model, rounded, runs, dtype, plan.huge, stays)
        if not found:
            break
        drifting |= {drift.node: (drift.code, drift.why) for drift in found}
    assert best is not None
    return best


def _strain(
    model: ir.Model,
    cases: Sequence[Case],
    precision: str,
    compare: Mapping[str, str],
    groups: Mapping[str, Sequence[Group]],
) -> float:
    worst = 0.0
    with loaded(model) as session:
        for case in cases:
            outputs = session.run(case.inputs)
            budget = case.halves.get(precision)
            if budget is None:
                free = {
                    name: dict.fromkeys(row, float("inf")) for name, row in case.allowed.items()
                }
                budget = free
            for name, mode in compare.items():
                if mode == "detections" and name in outputs:
                    edge = 2 * score_allowance(budget[name], groups.get(name, ()))
                    outputs[name] = align(outputs[name], case.outputs[name], edge)
            for found in compare_outputs(outputs, case.outputs, budget, case.truth, groups):
                if not found.passed and not np.isfinite(found.max_abs):
                    return float("inf")
                if np.isfinite(found.allowed) and case.outputs[found.output].dtype.kind == "f":
                    worst = max(worst, found.max_abs / found.allowed if found.allowed else 0.0)
    return worst
