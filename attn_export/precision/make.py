"""The graphs of a bundle, one for each target and precision, and what the manifest says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch

from attn_export import manifest as manifests
from attn_export.attention import fixed_cache
from attn_export.attention.caveats import causal_notes
from attn_export.attention.fixed_cache import State
from attn_export.attention.lowering import lower
from attn_export.attention.padding import unused_promises
from attn_export.attention.site import Account
from attn_export.capability import TARGETS, Target
from attn_export.capability.kernels import CUDA
from attn_export.errors import ExportError
from attn_export.exporting.exporter import Graph
from attn_export.models.spec import ExportSpec
from attn_export.parity.drawing import sizes_of, with_past
from attn_export.parity.tolerance import Array, Group
from attn_export.precision.half import make_half
from attn_export.precision.in_place import prove_in_place
from attn_export.precision.int8 import quantise
from attn_export.precision.judging import Groups, Request
from attn_export.precision.names import lowering_options, target_name
from attn_export.precision.plan import summary
from attn_export.precision.stand_in import STAND_IN
from attn_export.precision.whole import fused_ops, wrapped
from attn_export.reference import Case
from attn_export.tuning.cache import order as measured_order

CALIBRATION = 32  # held-out samples that ranges of int8 are taken from
Progress = Callable[[str], None]


@dataclass
class Made:
    """A graph, its sites, what the manifest's target says beside them, and notes."""

    model: ir.Model
    account: Account
    described: dict[str, Any]
    notes: list[str] = field(default_factory=list)


@dataclass
class AllMade:
    """The graphs of a bundle by file name, the manifest's `targets`, and notes."""

    files: dict[str, ir.Model] = field(default_factory=dict)
    targets: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make_all(
    graphs: Mapping[str, Graph],
    targets: Sequence[str],
    precisions: Sequence[str],
    cases: Sequence[Case],
    groups: Groups,
    tolerances: Mapping[tuple[str, str], Mapping[str, Any]],
    request: Request,
    progress: Progress,
) -> AllMade:
    """`make` for each target, precision and component."""
    found = AllMade()
    for target in dict.fromkeys(targets):
        found.notes += manifests.target_notes(TARGETS[target])
        for precision in precisions:
            name = target_name(target, precision)
            for component, graph in graphs.items():
                mine = [case for case in cases if case.component == component]
                made = make(
                    graph, component, TARGETS[target], precision, mine, groups[component], request,
                    progress,
                )  # fmt: skip
                file = f"{component}.{name}.onnx"
                row = manifests.describe_target(TARGETS[target], component, file, made.account)
                judged = {"name": name, "tolerance": dict(tolerances[component, precision])}
                found.targets.append({**row, **made.described, **judged})
                found.files[file] = made.model
                found.notes += made.notes
                found.notes += unused_promises(made.account, graph.spec.promises())
                causal = causal_notes(made.account)
                found.notes += [note for note in causal if note not in found.notes]
    return found


def make(
    graph: Graph,
    component: str,
    target: Target,
    precision: str,
    cases: Sequence[Case],
    groups: Mapping[str, Sequence[Group]],
    request: Request,
    progress: Progress,
) -> Made:
    """Lower for the target's kernels of that precision, then convert. Errors are `lower`'s."""
    model = graph.model.clone()
    caches = fixed_cache.growing(model, graph.spec.state) if graph.spec.cache_capacity else ()
    account = lower(
        model,
        target.runtime,
        sizes_of(graph.spec) if not caches else with_past(graph.spec),
        request.lowering,
        progress,
        less_work=request.less_work,
        order=measured_order(target.runtime),
        in_place=[given for _, given, _ in caches],
        **lowering_options(precision),
    )
    described: dict[str, Any] = {"precision": precision}
    if precision == "fp32":
        keep_in_place(model, caches, account, graph.spec.cache_capacity, cases)
        return Made(model, account, described)
    progress(f"making {component} in {precision} for {target.name}")
    before = fused_ops(model)
    where = f"{component} for {target.name} in {precision}"
    notes: list[str] = []
    if precision == "int8":
        samples, held_out = calibration(graph.spec, cases)
        made = quantise(model, target.runtime, samples)
        described["calibration"] = {"inputs": len(samples), "held_out": held_out}
        notes.append(
            f"the int8 ranges of {where} are taken from {len(samples)} inputs, {held_out} of them"
            " held-out samples that are scored as well"
        )
        if target.runtime == CUDA:
            notes.append(
                f"{where} may be slower than fp16: ONNX Runtime's CUDA provider was reported to run"
                " such graphs without int8 products"
            )
    else:
        half_io = _half_io(model, graph.spec, precision, request)
        half = make_half(
            model, precision, target.runtime, cases, graph.spec.compare, groups, half_io
        )
        made = half.model
        described |= {
            "kept_float32": [vars(kept) for kept in half.kept],
            "half_io": half_io,
            "stand_in": STAND_IN,
        }
        if half.kept:
            notes.append(f"{where} keeps in float32: {'; '.join(summary(half.kept))}")
    notes += _broken(model, made, before, where)
    keep_in_place(made, caches, account, graph.spec.cache_capacity, cases)
    described["io"] = _io(made)
    notes.append(_borders(where, described.get("half_io", [])))
    return Made(made, account, described, notes)


def keep_in_place(
    model: ir.Model,
    caches: Sequence[State],
    account: Account,
    capacity: int | None,
    cases: Sequence[Case],
) -> None:
    """Give a lowered graph caches of a fixed capacity, and prove that it answers as before.

    Raises:
        ExportError: a site cannot continue its cache in place, or the answers differ.
    """
    if not caches or capacity is None:
        return
    refused = [o for o in account.outcomes if o.in_place and o.status == "refused"]
    if refused:
        raise ExportError(
            f"{refused[0].site.name} cannot continue its cache in place: {refused[0].reasons[0]}",
            "leave --cache-capacity out, or choose a target and precision that has the kernel",
        )
    before = model.clone()
    fixed_cache.fix(model, caches)
    prove_in_place(before, model, caches, capacity, cases)


def calibration(spec: ExportSpec, cases: Sequence[Case]) -> tuple[list[Mapping[str, Array]], int]:
    """Inputs that are like real ones: the stored cases', and some held-out samples, counted."""
    samples: list[Mapping[str, Array]] = [case.inputs for case in cases]
    held_out: list[Mapping[str, Array]] = []
    metric = spec.metric
    batched = metric is not None and all(0 in spec.dynamic.get(name, {}) for name in metric.inputs)
    if metric is not None and batched and metric.inputs.keys() == spec.inputs.keys():
        count = min(CALIBRATION, len(metric.target))
        for index in range(count):
            rows = {name: tensor[index : index + 1] for name, tensor in metric.inputs.items()}
            held_out.append({spec.names.get(n, n): _array(tensor) for n, tensor in rows.items()})
    return [*samples, *held_out], len(held_out)


def _array(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().numpy()
    return array


def _half_io(model: ir.Model, spec: ExportSpec, precision: str, request: Request) -> list[str]:
    """Inputs and outputs that are float16: caches, or all; numpy has no bfloat16."""
    if precision != "fp16":
        return []
    caches = {name for output, given, _ in spec.state for name in (output, given)}
    return [
        str(value.name)
        for value in (*model.graph.inputs, *model.graph.outputs)
        if value.dtype == ir.DataType.FLOAT and (request.half_io or value.name in caches)
    ]


def _broken(model: ir.Model, made: ir.Model, before: Mapping[str, int], where: str) -> list[str]:
    after = fused_ops(made)
    notes = []
    if after != before:
        notes.append(f"{where} has {dict(after)} fused attention ops, it had {dict(before)}")
    known = set(wrapped(model))
    notes += [f"in {where}, {found}" for found in wrapped(made) if found not in known]
    return notes


def _io(model: ir.Model) -> dict[str, dict[str, str]]:
    """What the graph's inputs and outputs really are."""

    def dtypes(values: Sequence[ir.Value]) -> dict[str, str]:
        return {str(v.name): v.dtype.numpy().name for v in values if v.dtype is not None}

    return {"inputs": dtypes(model.graph.inputs), "outputs": dtypes(model.graph.outputs)}


def _borders(where: str, half_io: Sequence[str]) -> str:
    if not half_io:
        return f"{where} takes and gives float32 as before, it converts inside"
    shown = ", ".join(half_io[:4]) + (f" and {len(half_io) - 4} more" if len(half_io) > 4 else "")
    return f"{where} takes or gives float16 in {shown}; its other inputs and outputs are as before"
