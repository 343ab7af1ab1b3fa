"""The runs that a bundle stores: PyTorch at several sizes, masked and unmasked, and the truth."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from attn_export import right_padded
from attn_export.errors import ExportError, one_line
from attn_export.models.spec import Axis, ExportSpec
from attn_export.outputs import named_tensors
from attn_export.parity.detections import align
from attn_export.parity.generate import TOKEN
from attn_export.parity.judge import masked_allowances
from attn_export.parity.rules import Rule, parse_rule
from attn_export.parity.ties import settle_order
from attn_export.parity.tolerance import Array, Group, allowed_error, rms, split
from attn_export.reference import Case
from attn_export.signature import NO_BFLOAT16

SIZES = {"batch": (1, 3, 2), "other": (7, 12, 5)}
STEPS = 3
LARGEST = 1024  # positions of a case at the upper end of the declared lengths
CLOSE = 1e-4  # of its size: what float64 gives for the same row


def sizes_of(spec: ExportSpec) -> list[dict[str, int]]:
    """Two to four assignments of sizes to the dynamic axes, batch 1 and 3 among them.

    The first two differ from the example in every axis that has room to; the last one is the
    example's own. Each size lies inside the declared range.
    """
    axes = {axis.name: axis for row in spec.dynamic.values() for axis in row.values()}
    if not axes:
        return [{}]
    example = example_sizes(spec)
    picked = [
        {name: _pick(axis, index, example[name]) for name, axis in axes.items()} for index in (0, 1)
    ]
    # Lengths that grow together never show a query longer than its keys: cross them once.
    lengths = [name for name in axes if name != "batch"]
    crossed = picked[1] | {name: picked[0][name] for name in lengths[1:]}
    unique: list[dict[str, int]] = []
    for sizes in [*picked, *([crossed] if len(lengths) > 1 else []), example]:
        if sizes not in unique:
            unique.append(sizes)
    return unique


def ends_of(spec: ExportSpec) -> tuple[list[dict[str, int]], str]:
    """The smallest and the largest declared lengths, at the smallest batch; and what is too large.

    Sizes that `sizes_of` has are left out.
    """
    axes = {axis.name: axis for row in spec.dynamic.values() for axis in row.values()}
    lengths = {name: axis for name, axis in axes.items() if name != "batch"}
    if not lengths:
        return [], ""
    batch = {name: _pick(axis, 0, 1) for name, axis in axes.items() if name == "batch"}
    low = batch | {name: axis.min for name, axis in lengths.items()}
    high = batch | {name: axis.max for name, axis in lengths.items()}
    note, ends = "", [low]
    if math.prod(axis.max for axis in lengths.values()) <= LARGEST:
        ends.append(high)
    else:
        told = " ".join(f"{name}={axis.max}" for name, axis in lengths.items())
        note = f"the largest declared sizes ({told}) were not run, they take too long for a check"
    return [sizes for sizes in ends if sizes not in sizes_of(spec)], note


def example_sizes(spec: ExportSpec) -> dict[str, int]:
    return {
        axis.name: spec.inputs[name].shape[position]
        for name, row in spec.dynamic.items()
        for position, axis in row.items()
    }


def _pick(axis: Axis, index: int, example: int) -> int:
    if axis.name == "batch":
        return min(max(SIZES["batch"][index], axis.min), axis.max)
    near = (max(axis.min, example // 2), min(axis.max, example + max(1, example // 3)))
    return near[index]


def draw(spec: ExportSpec, sizes: Mapping[str, int], masked: bool, seed: int) -> dict[str, Tensor]:
    """Seeded inputs of the given sizes: the model's own, or its example's values drawn again.

    Redrawing keeps every value in the example's range (token ids stay in the vocabulary). Inputs
    of two values that are called a mask keep their more frequent value, or get holes.
    """
    generator = torch.Generator().manual_seed(seed)
    own = spec.draw(generator, sizes, masked) if spec.draw is not None else None
    drawn = _redrawn(spec, sizes, masked, generator) if own is None else own
    for name, keeps in spec.right_padded.items():
        drawn[name] = torch.from_numpy(right_padded.mended(drawn[name].numpy(), keeps))
    return drawn


def _redrawn(
    spec: ExportSpec, sizes: Mapping[str, int], masked: bool, generator: torch.Generator
) -> dict[str, Tensor]:
    drawn = {}
    for name, example in spec.inputs.items():
        shape = list(example.shape)
        for position, axis in spec.dynamic.get(name, {}).items():
            shape[position] = sizes[axis.name]
        if is_mask(name, example):
            drawn[name] = _mask(example, shape, masked, generator)
        else:
            index = torch.randint(example.numel(), shape, generator=generator)
            drawn[name] = example.flatten()[index]
    return drawn


def is_mask(name: str, example: Tensor) -> bool:
    """A bool input, or an integer one that is called a mask and holds zeros and ones."""
    if example.dtype == torch.bool:
        return True
    integer = not example.dtype.is_floating_point and "mask" in name.lower()
    return integer and bool(((example == 0) | (example == 1)).all())


def _mask(example: Tensor, shape: list[int], masked: bool, generator: torch.Generator) -> Tensor:
    usual = bool(example.float().mean() >= 0.5)
    holes = torch.rand(shape, generator=generator) < (0.3 if masked else 0.0)
    if masked and len(shape) > 1:  # every other row is padded at its end, as batches of text are
        holes.view(-1, shape[-1])[1::2] = torch.arange(shape[-1]) >= (shape[-1] + 1) // 2
    holes[..., :1] = False  # so that no row is blocked by chance
    return (holes != usual).to(example.dtype)


def takes_mask(spec: ExportSpec) -> bool:
    return any(
        is_mask(name, value) or "mask" in name.lower() for name, value in spec.inputs.items()
    )


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
        if takes_mask(spec):
            yield f"{where} masked", draw(spec, sizes, True, seed + index)


@contextmanager
def fast_path(*, enabled: bool) -> Iterator[None]:
    """Let nn.MultiheadAttention and nn.TransformerEncoder take their inference path, or not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled and before)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def run(
    spec: ExportSpec, module: nn.Module, inputs: Mapping[str, Tensor], *, fast: bool = False
) -> dict[str, Array]:
    """One eager run; outputs by name.

    Without PyTorch's fast path, unless `fast`: it is no part of the exported graph, and on padded
    positions it gives zeros instead of the layers' answers.

    Raises:
        ExportError: the model raises.
    """
    try:
        with torch.inference_mode(), fast_path(enabled=fast):
            tensors = [tensor for _, tensor in named_tensors(module(**inputs))]
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
        raise ExportError(
            f"the model raised {type(error).__name__} on {shapes}: {one_line(error)}",
            "declare only the sizes that it takes",
        ) from error
    for name, tensor in zip(spec.outputs, tensors, strict=True):
        if tensor.dtype is torch.bfloat16:
            raise ExportError(f"output '{name}' is bfloat16", NO_BFLOAT16)
    return {
        name: tensor.detach().numpy() for name, tensor in zip(spec.outputs, tensors, strict=True)
    }


def run_arrays(spec: ExportSpec, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """One eager run on arrays, by the names of the graph's inputs. Errors are those of `run`."""
    tensors = {spec.parameter(name): torch.tensor(array) for name, array in inputs.items()}
    return run(spec, spec.module, tensors)


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
