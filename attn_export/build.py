"""Source -> canonical graph -> one lowered and proved graph a target -> bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export import manifest as manifests
from attn_export.attention.lowering import check_choice
from attn_export.attention.padding import declare, masked_by_padding
from attn_export.cache_capacity import check_capacity, require_caches, to_graph
from attn_export.capability import TARGET_RUNTIMES
from attn_export.declarations import bring
from attn_export.errors import ExportError, RuntimeUnavailable, UsageError
from attn_export.exporting.exporter import Graph
from attn_export.fixed_caches import grown
from attn_export.models.spec import ExportSpec, Metric
from attn_export.parity.cases import build_cases, rules_of
from attn_export.parity.caveats import fast_path_note, rows_mix
from attn_export.parity.eager import run, run_arrays
from attn_export.parity.metrics import KINDS, evaluate, write_metric
from attn_export.parity.rules import check_rules
from attn_export.parity.tolerance import Group
from attn_export.parity.trace import FILE as TRACE
from attn_export.parity.trace import write_trace
from attn_export.parity.tracing import trace_all
from attn_export.precision.bounds import parse as parse_bound
from attn_export.precision.judging import (
    Request,
    check_use,
    declared_bounds,
    judge_all,
    require_bounds,
)
from attn_export.precision.make import make_all
from attn_export.precision.names import Precision, check_target, parse_precisions
from attn_export.reference import Case, write_cases
from attn_export.right_padded import REMOVE_PADDING, parse
from attn_export.runtimes.packages import onnxruntime_owner
from attn_export.source import (
    Source,
    declare_rules,
    eval_mode,
    promise,
    resolve,
    restore_mode,
)
from attn_export.weights import write_graphs

Progress = Callable[[str], None]
SEED = 0


def export(
    source: str | Source,
    output: Path | str,
    *,
    targets: Sequence[str] = ("cpu",),
    precision: str = "fp32",
    metric_bounds: Sequence[str] = (),
    io_dtype: str = "fp32",
    overwrite: bool = False,
    inputs: Sequence[str] = (),
    dynamic: Sequence[str] = (),
    lowering: str = "auto",
    less_work: bool = True,
    right_padded: Sequence[str] = (),
    remove_padding: Sequence[str] = (),
    cache_capacity: int | None = None,
    compare: Mapping[str, str] | None = None,
    mask_output: Mapping[str, str] | None = None,
    progress: Progress = lambda _: None,
) -> bundles.Bundle:
    """Export a model into a bundle at `output`, which appears complete or not at all.

    Args:
        source: a Source, or what `attn-export export SOURCE` takes.
        targets: of "cpu", "cuda", "tensorrt", "openvino" and "web"; each gets its own graph.
        precision: of "fp32", "fp16", "bf16" and "int8", several with commas between; each target
            gets a graph in each.
        metric_bounds: `NAME=VALUE`, as `attn_export.precision.bounds` has them.
        io_dtype: "fp16" makes the inputs and outputs of fp16 graphs float16, and not caches alone.
        dynamic: `INPUT=AXIS:MIN..MAX`.
        lowering: "auto", "contrib", "standard" or "decomposed".
        less_work: take out what reaches no output, as a last block's other tokens.
        right_padded: `INPUT`, a mask (B, T) whose rows are ones and then zeros, so that ops may get
            lengths in its place; `INPUT=0` where 0 is what keeps a key. Inputs that break this
            are refused when the bundle runs.
        remove_padding: `INPUT` or `INPUT=0`, such a mask (B, S) whose padding does not count: it is
            not computed where that is proved to change nothing else, and outputs (B, S, ...) are
            not compared there.
        cache_capacity: caches become buffers of so many positions at most, which past and present
            share so that no step copies them; for targets "cpu" and "cuda".
        compare: output -> how it is compared, as attn_export.parity.rules writes it.
        mask_output: output (B, S, ...) -> input (B, S) that is 0 where its positions do not count,
            or "not:INPUT" where it is 1 there.

    Raises:
        UsageError: an unknown model, target or option, or an output that exists.
        ExportError: the model does not export.
        RuntimeUnavailable: no onnxruntime to prove on.
        FileError: the bundle could not be written.
    """
    bounds = [parse_bound(text) for text in metric_bounds]
    request = Request(lowering, bounds, io_dtype == "fp16", less_work, cache_capacity)
    with bundles.write(Path(output), overwrite=overwrite) as stage:
        found = source if isinstance(source, Source) else resolve(source, inputs, dynamic)
        promise(found, parse(right_padded), parse(remove_padding, REMOVE_PADDING))
        declare_rules(found, compare or {}, mask_output or {})
        export_into(stage, found, targets, precision, request, progress)
    return bundles.read(Path(output))


def export_into(
    folder: Path,
    source: Source,
    targets: Sequence[str],
    precision: str,
    request: Request,
    progress: Progress,
) -> bundles.Bundle:
    """Export into an existing, empty folder. Errors are those of `export`."""
    precisions = check_request(targets, precision, request.lowering, request.cache_capacity)
    check_use(precisions, request)
    onnxruntime_owner()  # fail before the long part
    flags = [eval_mode(spec.module) for spec in source.components.values()]
    notes = list(source.notes)
    if any(training for modules in flags for training in modules.values()):
        notes.append("the module was in train mode; it is exported in eval mode")
    try:
        return _export_into(folder, source, targets, precisions, request, notes, progress)
    finally:
        for modules in reversed(flags):  # components may share modules
            restore_mode(modules)


def check_request(
    targets: Sequence[str], precision: str, lowering: str, cache_capacity: int | None = None
) -> tuple[Precision, ...]:
    """The precisions; raises UsageError for a target, precision or lowering that is not built."""
    precisions = parse_precisions(precision)
    if not targets:
        raise UsageError("no target is named", f"the targets are {', '.join(TARGET_RUNTIMES)}")
    for target in targets:
        if target not in TARGET_RUNTIMES:
            known = ", ".join(TARGET_RUNTIMES)
            raise UsageError(f"there is no target '{target}'", f"the targets are {known}")
        check_choice(TARGET_RUNTIMES[target], lowering)
        for found in precisions:
            check_target(target, found)
    if cache_capacity is not None:
        check_capacity(cache_capacity, targets, precisions, lowering)
    return precisions


def _export_into(
    folder: Path,
    source: Source,
    targets: Sequence[str],
    precisions: Sequence[Precision],
    request: Request,
    notes: list[str],
    progress: Progress,
) -> bundles.Bundle:
    bounds = declared_bounds(source.components, request.bounds)
    if "int8" in precisions:
        require_bounds(bounds)  # before the long part
    graphs: dict[str, Graph] = {}
    for component, spec in source.components.items():
        progress(f"exporting {component} to ONNX")
        graphs[component] = to_graph(spec, request.cache_capacity)
        declare(graphs[component].model, spec.promises(), spec.removed())
        graphs[component].spec.masked |= masked_by_padding(graphs[component].model)
        notes += graphs[component].notes
        _check_rules(graphs[component].spec)
    require_caches(graphs, request.cache_capacity)

    cases: list[Case] = []
    groups: dict[str, dict[str, list[Group]]] = {}
    mixed: list[str] = []
    for component, graph in graphs.items():
        progress(f"running PyTorch on the reference cases of {component}")
        groups[component] = _groups(graph.spec)
        built, note = build_cases(component, graph.spec, groups[component], SEED)
        cases += built
        notes += [text for text in (note, fast_path_note(graph.spec, built)) if text]
        if rows_mix(graph.spec, built):
            mixed.append(component)
            notes.append(
                "axis 0 is not a batch of independent rows, PyTorch mixes them; if the batch is"
                " another axis, declare it with --dynamic INPUT=AXIS:batch:MIN..MAX"
            )

    cases, tolerances = judge_all(graphs, cases, groups, precisions, bounds, progress)
    made = make_all(graphs, targets, precisions, cases, groups, tolerances, request, progress)
    notes += made.notes

    lowered = {entry["file"]: entry["component"] for entry in made.targets}
    traced, gaps = trace_all(graphs, [(lowered[name], m) for name, m in made.files.items()],
                             cases, progress)  # fmt: skip
    notes += gaps
    progress("writing the bundle")
    manifest = manifests.assemble(source.name, source.origin, graphs, made.targets, notes)
    manifest["seed"] = SEED
    if mixed:
        manifest["rows_mix"] = mixed
    bring(folder, [graph.spec for graph in graphs.values()], manifest)
    write_graphs(folder, made.files, bundles.WEIGHTS)
    manifest["notes"] += manifests.weights_notes(targets, folder / bundles.WEIGHTS)
    write_cases(folder / bundles.REFERENCE, cases, groups)
    if traced:
        write_trace(folder / TRACE, traced)
    for component, graph in graphs.items():
        if graph.spec.metric is not None:
            progress("scoring PyTorch on the held-out samples")
            try:
                _add_metric(folder, manifest, component, graph.spec.metric, graphs)
            except RuntimeUnavailable as error:
                del manifest["metric"]
                (folder / bundles.METRIC).unlink()
                manifest["notes"].append(f"no held-out score: {error.observed}")
    bundles.seal(folder, manifest)
    return bundles.read(folder)


def _check_rules(spec: ExportSpec) -> None:
    outputs = run(spec, spec.module, spec.inputs)
    inputs = {spec.names.get(name, name): value.dim() for name, value in spec.inputs.items()}
    check_rules(rules_of(spec), {name: array.ndim for name, array in outputs.items()}, inputs)


def _groups(spec: ExportSpec) -> dict[str, list[Group]]:
    return {
        name: [Group(g.name, g.axis, g.start, g.stop) for g in row]
        for name, row in spec.groups.items()
    }


def _add_metric(
    folder: Path,
    manifest: dict[str, Any],
    component: str,
    metric: Metric,
    graphs: Mapping[str, Graph],
) -> None:
    """Store the held-out samples; PyTorch's own score goes into the manifest."""
    if metric.kind not in KINDS:
        raise ExportError(f"there is no metric '{metric.kind}'", f"use {', '.join(KINDS)}")
    inputs = {name: tensor.numpy() for name, tensor in metric.inputs.items()}
    target = metric.target.numpy()
    write_metric(folder / bundles.METRIC, inputs, target)
    manifest["metric"] = {
        "kind": metric.kind,
        "component": component,
        "output": metric.output,
        "samples": len(target),
    }
    runs = {name: partial(run_arrays, graph.spec) for name, graph in graphs.items()}
    manifest["metric"]["reference"] = evaluate(grown(manifest), runs, inputs, target)
