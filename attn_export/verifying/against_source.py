"""Cases of a PyTorch source, for a model that somebody else may have exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attn_export import bundle as bundles
from attn_export.errors import ExportError, UsageError
from attn_export.exporting.exporter import completed, exporter_state
from attn_export.fixed_caches import FixedCaches
from attn_export.models.spec import Axis, ExportSpec
from attn_export.models.spec import Group as SpecGroup
from attn_export.parity.cases import build_cases, rules_of
from attn_export.parity.caveats import fast_path_note, rows_mix
from attn_export.parity.drawing import draw, example_sizes
from attn_export.reference import Case
from attn_export.source import Source, eval_mode, resolve, restore_mode
from attn_export.verifying.drawn import MIXED, Drawn, Request, mixing, with_batch
from attn_export.verifying.subject import COMPONENT, declared, entries, is_file, with_rules

Progress = Callable[[str], None]
Entries = Sequence[Mapping[str, Any]]


def of_source(bundle: bundles.Bundle, origin: str, request: Request, progress: Progress) -> Drawn:
    """Errors are those of `attn_export.verifying.against.draw_cases`."""
    progress(f"loading {origin}")
    source = resolve(origin, request.inputs, request.dynamic)
    parts = _parts(bundle, source)
    notes = list(source.notes)
    flags = [eval_mode(spec.module) for spec in parts.values()]
    try:
        fitted: dict[str, ExportSpec] = {}
        for component, spec in parts.items():
            fitted[component], said = _fitted(bundle, component, spec, request.seed)
            notes += said
            if is_file(bundle):
                rules = rules_of(fitted[component])
                bundle = with_rules(bundle, rules, component)
        bundle = declared(bundle, request.compare, request.masked)
        cases: list[Case] = []
        for component, spec in fitted.items():
            progress(f"running PyTorch on cases of {component}")
            made, said, mixed = _answered(bundle, component, spec, parts[component], request.seed)
            cases += made
            notes += said
            if mixed and component not in bundle.manifest.get("rows_mix", ()):
                bundle = mixing(bundle, [component])
                notes.append(MIXED.format("PyTorch"))
    finally:
        for modules in reversed(flags):
            restore_mode(modules)
    bundle = with_batch(bundle, cases) if is_file(bundle) else bundle
    return Drawn(bundle, cases, "PyTorch", request.seed, notes)


def _parts(bundle: bundles.Bundle, source: Source) -> dict[str, ExportSpec]:
    """The source's spec for each component of the model; a file is the one whose inputs it has."""
    if all(component in source.components for component in bundle.components):
        return {component: source.components[component] for component in bundle.components}
    if is_file(bundle):
        given = {entry["name"] for entry in bundle.manifest["inputs"]}
        fits = {
            name: spec
            for name, spec in source.components.items()
            if {spec.names.get(n, n) for n in spec.inputs} == given or len(source.components) == 1
        }
        if len(fits) == 1:
            return {COMPONENT: next(iter(fits.values()))}
    raise UsageError(
        f"{source.origin} has components {', '.join(source.components)}, the model has"
        f" {', '.join(bundle.components)}",
        "name the model that it was exported from",
    )


def _fitted(
    bundle: bundles.Bundle, component: str, spec: ExportSpec, seed: int
) -> tuple[ExportSpec, list[str]]:
    """The spec with the model's names, and only sizes that the model takes; and what was assumed.

    Raises:
        UsageError: the model has an input that the source has not, or another fixed size.
        ExportError: the source raises on its example.
    """
    named = bool(spec.outputs)
    with exporter_state():
        spec = completed(spec)
    notes: list[str] = []
    inputs, outputs = (entries(bundle, key, component) for key in ("inputs", "outputs"))
    spec, said = _with_input_names(spec, inputs)
    notes += said
    theirs = tuple(entry["name"] for entry in outputs)
    if {*theirs} != {*spec.outputs} and not named and len(theirs) == len(spec.outputs):
        notes.append(
            "the source gives its outputs no names of their own, so they were compared in order:"
            f" {', '.join(spec.outputs)} as {', '.join(theirs)}"
        )
        spec = replace(spec, outputs=theirs)
    dynamic, said = _shared_axes(spec, inputs)
    caches = FixedCaches.of(bundle.manifest, component)
    spec = replace(spec, dynamic=dynamic, cache_capacity=caches.capacity if caches else None)
    sizes = {
        axis.name: min(max(example_sizes(spec)[axis.name], axis.min), axis.max)
        for axes in dynamic.values()
        for axis in axes.values()
    }
    if sizes != example_sizes(spec):
        spec = replace(spec, inputs=draw(spec, sizes, False, seed))
    _check_sizes(spec, inputs)
    return spec, notes + said


def _with_input_names(spec: ExportSpec, inputs: Entries) -> tuple[ExportSpec, list[str]]:
    wanted = [entry["name"] for entry in inputs]
    own = {parameter: spec.names.get(parameter, parameter) for parameter in spec.inputs}
    if unknown := [name for name in wanted if name not in own.values()]:
        spare = [parameter for parameter, name in own.items() if name not in wanted]
        if len(spare) != len(unknown):
            raise UsageError(
                f"the model has input '{unknown[0]}', which the source has not",
                f"the source's inputs are {', '.join(own.values())}",
            )
        pairs = dict(zip(spare, unknown, strict=True))
        told = ", ".join(f"{own[parameter]} as {name}" for parameter, name in pairs.items())
        note = f"inputs are called otherwise in the source, so they were taken in order: {told}"
        return replace(spec, names={**spec.names, **pairs}), [note]
    return spec, []


def _shared_axes(spec: ExportSpec, inputs: Entries) -> tuple[dict[str, dict[int, Axis]], list[str]]:
    """The axes that vary in the source, within what the model takes; fixed ones have one size."""
    taken: dict[str, tuple[int, int]] = {}
    notes = []
    axes = spec.axes()
    for entry in inputs:
        ranges = entry.get("ranges", {})
        for position, size in enumerate(entry["shape"]):
            axis = axes.get(entry["name"], {}).get(position)
            if axis is None:
                if isinstance(size, str):
                    notes.append(
                        f"axis {position} of '{entry['name']}' may vary in the model; the source"
                        " does not declare it, so one size was run (--dynamic declares it)"
                    )
                continue
            low, high = (size, size) if isinstance(size, int) else ranges.get(size, (0, axis.max))
            before = taken.get(axis.name, (axis.min, axis.max))
            taken[axis.name] = (max(before[0], low), min(before[1], high))
            if isinstance(size, int):
                notes.append(
                    f"the model takes {size} alone on axis {position} of '{entry['name']}'"
                )
    for name, (low, high) in taken.items():
        if low > high:
            raise UsageError(
                f"the model and its source share no size of '{name}'", "compare with its own source"
            )
    dynamic = {
        name: {
            position: Axis(axis.name, *taken.get(axis.name, (axis.min, axis.max)))
            for position, axis in row.items()
        }
        for name, row in spec.dynamic.items()
    }
    return dynamic, notes


def _check_sizes(spec: ExportSpec, inputs: Entries) -> None:
    for entry in inputs:
        example = spec.inputs[spec.parameter(entry["name"])]
        shape = entry["shape"]
        dtype = str(example.dtype).removeprefix("torch.")
        fits = len(shape) == example.dim() and all(
            isinstance(size, str) or size == other
            for size, other in zip(shape, example.shape, strict=True)
        )
        if not fits or dtype != entry["dtype"]:
            raise UsageError(
                f"input '{entry['name']}' of the model is {entry['dtype']} {tuple(shape)}, the"
                f" source's is {dtype} {tuple(example.shape)}",
                "give example inputs of the model's sizes, with --input or in the factory",
            )


def _answered(
    bundle: bundles.Bundle, component: str, spec: ExportSpec, given: ExportSpec, seed: int
) -> tuple[list[Case], list[str], bool]:
    """PyTorch's answers, by the names of the model, with notes and whether rows mix.

    A batch that nobody declared may be refused by the source: then its own size is run alone.
    """
    rules = bundle.rules()[component]
    spec = replace(
        spec,
        compare={name: rule.word for name, rule in rules.items() if name in spec.outputs},
        masked={n: rule.mask for n, rule in rules.items() if rule.mask and n in spec.outputs},
        groups={n: tuple(SpecGroup(**vars(g)) for g in r.groups) for n, r in rules.items()},
    )
    groups = {name: list(rule.groups) for name, rule in rules.items()}
    taken = {entry["name"] for entry in entries(bundle, "inputs", component)}
    notes = []
    try:
        cases, note = build_cases(component, spec, groups, seed)
    except ExportError as error:
        if spec.dynamic.keys() == given.dynamic.keys():
            raise
        fixed = {name: axes for name, axes in spec.dynamic.items() if name in given.dynamic}
        spec = replace(spec, dynamic=fixed)
        cases, note = build_cases(component, spec, groups, seed)
        notes.append(f"the source takes no other batch ({error.observed})")
    notes += [text for text in (note, fast_path_note(spec, cases)) if text]
    if unused := sorted({name for case in cases for name in case.inputs} - taken):
        notes.append(f"the model does not take {', '.join(unused)} of the source")
    mixed = rows_mix(spec, cases)
    cut = [replace(c, inputs={n: a for n, a in c.inputs.items() if n in taken}) for c in cases]
    return cut, notes, mixed
