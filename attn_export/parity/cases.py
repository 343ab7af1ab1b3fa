"""The runs that a bundle stores: PyTorch at several sizes, masked and unmasked, and the truth."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.errors import ExportError, one_line
from attn_export.models.spec import ExportSpec
from attn_export.parity.detections import align
from attn_export.parity.drawing import (
    CACHE_BYTES,
    cache_bytes,
    draw,
    ends_of,
    example_sizes,
    sizes_of,
    takes_mask,
)
from attn_export.parity.eager import run
from attn_export.parity.generate import TOKEN
from attn_export.parity.judge import masked_allowances
from attn_export.parity.rules import Rule, parse_rule
from attn_export.parity.ties import settle_order
from attn_export.parity.tolerance import Array, Group, allowed_error, rms, split
from attn_export.reference import Case

STEPS = 3
CLOSE = 1e-4  # of its size: what float64 gives for the same row


def build_cases(
    component: str, spec: ExportSpec, groups: Mapping[str, list[Group]], seed: int = 0
) -> tuple[list[Case], str]:
    """Run PyTorch on every case; also a note on the truth, empty where it was computed.

    Raises:
        ExportError: the model raises at a size that is declared.
    """
    double, note = _in_double(spec.module)
    rules = rules_of(spec)
    cases: list[Case] = []

    def answer(label: str, inputs: Mapping[str, Tensor]) -> Case:
        nonlocal double, note
        outputs = run(spec, spec.module, inputs)
        truth: dict[str, Array] = {}
        if double is not None:
            try:
                truth = run(spec, double, {name: _double(value) for name, value in inputs.items()})
            except ExportError as error:
                double, note = None, f"no float64 truth: {error.observed}"
        truth = _in_order(truth, outputs, rules)
        try:
            allowed = {
                name: {
                    group: allowed_error(part, _part(truth, name, groups, group))
                    for group, part in split(array, groups.get(name, ())).items()
                }
                for name, array in outputs.items()
            }
        except ValueError as error:
            raise ExportError(one_line(error), "mend the groups of that output") from error
        arrays = {spec.names.get(name, name): value.numpy() for name, value in inputs.items()}
        name = label if component == "model" else f"{component} {label}"
        case = Case(name, component, arrays, outputs, _floats(truth), allowed)
        return replace(case, allowed=masked_allowances(case, rules))

    for label, inputs in _inputs(spec, seed):
        cases.append(answer(label, inputs))
    ends, too_large = ends_of(spec)
    notes = [too_large]
    for index, sizes in enumerate(ends):
        masked = takes_mask(spec) and sizes == ends[-1]
        label = f"{_told(sizes)}{' masked' if masked else ''}"
        try:
            case = answer(label, draw(spec, sizes, masked, seed + 50 + index))
        except ExportError as error:
            notes.append(
                f"PyTorch itself does not run at {label}, which is declared: {error.observed}"
            )
            continue
        if all(array.size for array in case.outputs.values()):
            cases.append(case)
    for label, inputs in _next_steps(spec, cases, component, seed):
        cases.append(answer(label, inputs))
    notes += _unknown(cases)
    return cases, "; ".join(text for text in (note, *notes) if text)


def _unknown(cases: Sequence[Case]) -> Iterator[str]:
    """Where PyTorch's own answer is NaN, which a runtime then has to give as well."""
    found: dict[str, list[str]] = {}
    for case in cases:
        for name, array in case.outputs.items():
            if array.dtype.kind == "f" and np.isnan(array).any():
                found.setdefault(name, []).append(case.name)
    for name, where in found.items():
        yield (
            f"PyTorch's own '{name}' is NaN in places ({', '.join(where)}), as queries that may see"
            " no key give it in some calls; a runtime must give NaN at the same places"
        )


def _told(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items()) or "fixed sizes"


def _next_steps(
    spec: ExportSpec, cases: Sequence[Case], component: str, seed: int
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The steps that follow the largest case, where one step takes one token and has caches.

    Each is drawn a new token, and is given the caches of the step before: what a runtime must reach
    with its own caches as well.
    """
    token = spec.parameter(TOKEN)
    if not spec.state or token not in spec.inputs or 1 in spec.dynamic.get(token, {}):
        return
    case = max(reversed(cases), key=lambda case: case.inputs[TOKEN].shape[0])
    label = case.name if component == "model" else case.name.removeprefix(f"{component} ")
    sizes = {
        axis.name: case.inputs[name].shape[position]
        for name, axes in spec.axes().items()
        for position, axis in axes.items()
    }
    limits = {axis.name: axis.max for axes in spec.dynamic.values() for axis in axes.values()}
    grown = {
        axes[place].name
        for _, given, place in spec.state
        if (axes := spec.axes().get(given, {})) and place in axes and axes[place].name != "batch"
    }
    inputs = {spec.parameter(name): torch.tensor(array) for name, array in case.inputs.items()}
    for step in range(2, STEPS + 2):
        if any(sizes[name] + step - 1 > limits[name] for name in grown):
            return
        outputs = run(spec, spec.module, inputs)
        inputs = dict(inputs)
        inputs[token] = draw(spec, sizes, False, seed + 100 + step)[token]
        for output, given, _ in spec.state:
            inputs[spec.parameter(given)] = torch.tensor(outputs[output])
        yield f"{label}, step {step}", inputs


def rules_of(spec: ExportSpec) -> dict[str, Rule]:
    """How each output is compared.

    Raises:
        UsageError: a way that there is not, or by an output or input that there is not.
    """
    rules = {}
    for name in {**dict.fromkeys(spec.outputs), **spec.compare, **spec.masked}:
        groups = tuple(Group(g.name, g.axis, g.start, g.stop) for g in spec.groups.get(name, ()))
        rule = parse_rule(spec.compare.get(name, "elementwise"))
        rules[name] = replace(rule, mask=spec.masked.get(name, ""), groups=groups)
    return rules


def _in_order(
    truth: Mapping[str, Array], outputs: Mapping[str, Array], rules: Mapping[str, Rule]
) -> dict[str, Array]:
    """The truth with its rows in the order of float32, where the order is up to rounding."""
    found = dict(truth)
    for name in [n for n in found if n in rules and rules[n].compare == "detections"]:
        found[name] = align(found[name], outputs[name], edge=float("inf"))
    for scores in {rule.sorted_by for rule in rules.values()} & found.keys():
        names = [n for n in found if n == scores or (n in rules and rules[n].sorted_by == scores)]
        near = {name: CLOSE * _size(outputs[name]) for name in names}
        found |= settle_order(
            {n: found[n] for n in names}, {n: outputs[n] for n in names}, scores, near
        )
    return found


def _size(array: Array) -> float:
    values = np.asarray(array, np.float64)
    return rms(values[np.isfinite(values)])


def _inputs(spec: ExportSpec, seed: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Labels and inputs; at the example's own sizes the example itself, which its owner knows."""
    for index, sizes in enumerate(sizes_of(spec)):
        where = _told(sizes)
        own = sizes == example_sizes(spec)
        yield where, dict(spec.inputs) if own else draw(spec, sizes, False, seed + index)
        if takes_mask(spec) and not (own and cache_bytes(spec, sizes) > CACHE_BYTES):
            yield f"{where} masked", draw(spec, sizes, True, seed + index)


def _in_double(module: nn.Module) -> tuple[nn.Module | None, str]:
    try:
        return copy.deepcopy(module).double(), ""
    except Exception as error:  # a module may refuse to be copied in ways of its own
        return None, f"no float64 truth: the model does not copy ({one_line(error)})"


def _double(value: Tensor) -> Tensor:
    return value.double() if value.dtype.is_floating_point else value


def _floats(truth: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array for name, array in truth.items() if array.dtype.kind == "f"}


def _part(
    truth: Mapping[str, Array], name: str, groups: Mapping[str, list[Group]], group: str
) -> Array | None:
    array = truth.get(name)
    return None if array is None else split(array, groups.get(name, ()))[group]
