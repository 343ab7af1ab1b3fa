"""How far off a half-precision graph may be: as far as PyTorch's own run in that precision is.

    allowed = max(FACTOR * error of PyTorch in half, HALF_FLOOR * eps(half) * rms(truth))

The truth is PyTorch in float64, or in float32 where it does not run in double. A run judges nothing
where it raises, is not finite, or is so far off that its allowance would let anything pass; then
PyTorch's autocast is tried, which keeps norms and sums in float32, and at last a declared bound.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.errors import one_line
from attn_export.models.spec import ExportSpec
from attn_export.outputs import named_tensors
from attn_export.parity.detections import align, score_allowance
from attn_export.parity.eager import fast_path
from attn_export.parity.tolerance import (
    FACTOR,
    HALF_FLOOR,
    Array,
    Group,
    allowed_error,
    max_abs,
    split,
)
from attn_export.precision.names import DTYPES
from attn_export.reference import Budget, Case

TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}
METHOD = {"fp16": "module.half()", "bf16": "module.bfloat16()"}
Groups = Mapping[str, Sequence[Group]]


@dataclass(frozen=True)
class Yardstick:
    """What judges the graphs of one component in one precision.

    Attributes:
        cases: with their allowance for that precision, where PyTorch's own run judges it.
        used: the run that does, in words; empty where none can.
        why_not: what was seen of those that cannot.
    """

    cases: list[Case]
    used: str
    why_not: str = ""


def measure(spec: ExportSpec, cases: Sequence[Case], groups: Groups, precision: str) -> Yardstick:
    """Run PyTorch in half on the stored cases; the module is copied, never changed."""
    refused = []
    ways: tuple[tuple[str, Callable[[], nn.Module], bool], ...] = (
        (METHOD[precision], lambda: copy.deepcopy(spec.module).to(TORCH[precision]), False),
        (f"torch.autocast('cpu', {DTYPES[precision]})", lambda: spec.module, True),
    )
    for name, build, autocast in ways:
        used = f"PyTorch's own {precision} run, {name} on the CPU"
        try:
            module = build()
            judged = [_judged(spec, module, case, groups, precision, autocast) for case in cases]
        except _NoYardstick as error:
            refused.append(f"{name} {error}")
        except Exception as error:  # a module may refuse to be copied in ways of its own
            refused.append(f"{name} is not possible ({one_line(error)})")
        else:
            return Yardstick(judged, used, "; ".join(refused))
    return Yardstick(list(cases), "", "; ".join(refused))


class _NoYardstick(Exception):
    """Why a run judges nothing, as what follows its name."""


def _judged(
    spec: ExportSpec, module: nn.Module, case: Case, groups: Groups, precision: str, autocast: bool
) -> Case:
    outputs = _run(spec, module, case, precision, autocast)
    allowed: Budget = {}
    own: Budget = {}
    for name, reference in case.outputs.items():
        mine = outputs[name]
        if reference.dtype.kind in "biu":
            allowed[name] = dict.fromkeys(case.allowed[name], 0.0)
            continue
        truth = np.asarray(case.truth.get(name, reference), np.float64)
        if not np.isfinite(mine[np.isfinite(truth)]).all():
            raise _NoYardstick(f"is not finite in output '{name}' of case {case.name}")
        parts = groups.get(name, ())
        if spec.compare.get(name) == "detections":
            loose = align(mine, reference, edge=float("inf"))
            edge = 2 * score_allowance(_budgets(loose, truth, parts, precision)[0], parts)
            mine = align(mine, reference, edge)
        allowed[name], own[name] = _budgets(mine, truth, parts, precision)
        for group, part in split(truth, parts).items():
            size = float(np.abs(part[np.isfinite(part)]).max(initial=0.0))
            if FACTOR * own[name][group] >= size > 0:
                share = own[name][group] / size
                raise _NoYardstick(
                    f"is off by {share:.0%} of output '{name}' in case {case.name}, so that it"
                    " would let anything pass"
                )
    return replace(
        case, halves={**case.halves, precision: allowed}, own={**case.own, precision: own}
    )


def _budgets(
    mine: Array, truth: Array, parts: Sequence[Group], precision: str
) -> tuple[dict[str, float], dict[str, float]]:
    """What is allowed, and the run's own error, group by group."""
    truths = split(truth, parts)
    found = split(mine, parts)
    allowed = {
        group: allowed_error(part, truths[group], dtype=DTYPES[precision], floor=HALF_FLOOR)
        for group, part in found.items()
    }
    own = {
        group: max_abs(np.asarray(part, np.float64), np.asarray(truths[group], np.float64))
        for group, part in found.items()
    }
    return allowed, own


def _run(
    spec: ExportSpec, module: nn.Module, case: Case, precision: str, autocast: bool
) -> dict[str, Array]:
    """Outputs by name, floats as float32."""
    dtype = TORCH[precision]
    context = torch.autocast("cpu", dtype) if autocast else nullcontext()

    def given(array: Array) -> Tensor:
        tensor = torch.tensor(array)
        return tensor.to(dtype) if tensor.is_floating_point() and not autocast else tensor

    inputs = {spec.parameter(name): given(array) for name, array in case.inputs.items()}
    try:
        with torch.inference_mode(), fast_path(enabled=False), context:
            tensors = [tensor for _, tensor in named_tensors(module(**inputs))]
    except Exception as error:
        raise _NoYardstick(f"raises {type(error).__name__} ({one_line(error)})") from error
    return {
        name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        for name, tensor in zip(spec.outputs, tensors, strict=True)
    }
