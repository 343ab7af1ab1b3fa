"""The runs that a bundle stores: PyTorch at several sizes, masked and unmasked, and the truth."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attn_export import right_padded
from attn_export.errors import ExportError, one_line
from attn_export.models.spec import Axis, ExportSpec
from attn_export.outputs import named_tensors
from attn_export.parity.detections import align
from attn_export.parity.tolerance import Array, Group, allowed_error, split
from attn_export.reference import Case
from attn_export.signature import NO_BFLOAT16

SIZES = {"batch": (1, 3, 2), "other": (7, 12, 5)}


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
    cases = []
    for label, inputs in _inputs(spec, seed):
        outputs = run(spec, spec.module, inputs)
        truth: dict[str, Array] = {}
        if double is not None:
            try:
                truth = run(spec, double, {name: _double(value) for name, value in inputs.items()})
            except ExportError as error:
                double, note = None, f"no float64 truth: {error.observed}"
        for output in set(truth) & {n for n, mode in spec.compare.items() if mode == "detections"}:
            truth[output] = align(truth[output], outputs[output], edge=float("inf"))
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
        cases.append(Case(name, component, arrays, outputs, _floats(truth), allowed))
    return cases, note


def _inputs(spec: ExportSpec, seed: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Labels and inputs; at the example's own sizes the example itself, which its owner knows."""
    for index, sizes in enumerate(sizes_of(spec)):
        where = " ".join(f"{name}={size}" for name, size in sizes.items()) or "fixed sizes"
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
