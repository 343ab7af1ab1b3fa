"""What a factory returned -> an ExportSpec: inputs by name, outputs by name, dynamic axes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.declarations import declare
from attn_export.errors import ExportError, UsageError, one_line
from attn_export.inputs import tensors_only
from attn_export.models.spec import Axis, ExportSpec
from attn_export.outputs import is_layered

BATCH = Axis("batch", 1, 1024)
HOW_DYNAMIC = "declare {input: {axis: name}}, with axes counted from 0"
NO_BFLOAT16 = "NumPy has no such type, so give the model in float32"
EXAMPLE_ATTRIBUTES = ("example_inputs", "example_input_array", "dummy_inputs")


def describe(origin: str, made: Any, options: Sequence[str] = ()) -> ExportSpec:
    """Turn a module, (module, inputs[, dynamic[, facts]]) or ExportSpec into an ExportSpec.

    Args:
        options: `NAME=DTYPE[SIZE,...]`, used where the factory gave no inputs.

    Raises:
        ExportError: it is none of these, or its inputs do not fit `forward`.
    """
    if isinstance(made, ExportSpec):
        return made
    parts = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 4:
        raise ExportError(
            f"{origin} returned {type(made).__name__} instead of a model",
            "return a module, or (module, example_inputs[, dynamic[, facts]])",
        )
    module = parts[0]
    given = parts[1] if len(parts) > 1 else _examples(origin, module, options)
    values = _by_name(origin, module, given)
    module, inputs, names = tensors_only(module, values)
    _check(origin, inputs)
    declared = (parts[2] or {}) if len(parts) > 2 else {}
    if isinstance(declared, (tuple, list)):
        declared = dict(zip(values, declared, strict=False))
    if isinstance(declared, Mapping) and names:  # what is said of a cache holds for all of it
        of_caches = [axes for name, axes in declared.items() if is_layered(values.get(name))]
        declared = {n: axes for n, axes in declared.items() if not is_layered(values.get(n))}
        declared |= {name: axes for axes in of_caches for name in names}
    dynamic = read_dynamic(origin, inputs, declared)
    spec = ExportSpec(module=module, inputs=inputs, dynamic=dynamic, names=names)
    if len(parts) > 3:
        declare(origin, spec, parts[3] or {})
    return spec


def _examples(origin: str, module: nn.Module, options: Sequence[str]) -> Any:
    if options:
        return dict(map(parse_input, options))
    for attribute in EXAMPLE_ATTRIBUTES:
        value = getattr(module, attribute, None)
        if value is not None:
            return value() if callable(value) else value
    raise ExportError(
        f"{origin} returned a module without example inputs",
        "return (module, example_inputs), or give --input NAME=float32[2,3,224,224]",
    )


def bind(origin: str, module: nn.Module, given: Any) -> dict[str, Tensor]:
    """Example inputs by the names of `forward`'s parameters.

    Raises:
        ExportError: they do not fit, or one of them is not a tensor.
    """
    named = _by_name(origin, module, given)
    _check(origin, named)
    return named


def _by_name(origin: str, module: nn.Module, given: Any) -> dict[str, Any]:
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(given, Mapping):
        kwargs = given
    elif isinstance(given, (tuple, list)):
        args = tuple(given)
    else:
        args = (given,)
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ExportError(
            f"the example inputs of {origin} do not fit its forward ({one_line(error)})",
            "give them in forward's order or by its names",
        ) from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = inspect.signature(module.forward).parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif value is not None:
            named[name] = value
    return named


def _check(origin: str, named: Mapping[str, Any]) -> None:
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ExportError(
                f"input '{name}' of {origin} is {type(value).__name__}",
                "wrap the model so that its inputs are tensors, with the rest fixed inside",
            )
        if value.dtype is torch.bfloat16:
            raise ExportError(f"input '{name}' of {origin} is bfloat16", NO_BFLOAT16)
    if not named:
        raise ExportError(f"{origin} has no example inputs", "give at least one tensor")


def read_dynamic(
    origin: str, inputs: Mapping[str, Tensor], given: Any
) -> dict[str, dict[int, Axis]]:
    """Read a factory's dynamic dimensions: input name -> axis -> Axis, Dim, name or range.

    Raises:
        ExportError: an unknown input, or something else than these.
    """
    if isinstance(given, (tuple, list)):
        given = dict(zip(inputs, given, strict=False))
    if not isinstance(given, Mapping):
        raise ExportError(f"{origin} declares dynamic axes as {given!r}", HOW_DYNAMIC)
    found: dict[str, dict[int, Axis]] = {}
    for name, axes in given.items():
        if name not in inputs:
            raise ExportError(
                f"{origin} declares '{name}' dynamic, which is not an input",
                f"its inputs are {', '.join(inputs)}",
            )
        if not isinstance(axes, (Mapping, tuple, list, NoneType)):
            raise ExportError(f"{origin} declares '{name}' dynamic as {axes!r}", HOW_DYNAMIC)
        pairs = axes.items() if isinstance(axes, Mapping) else enumerate(axes or ())
        rank = inputs[name].dim()
        found[name] = {}
        for axis, value in pairs:
            if not isinstance(axis, int) or not -rank <= axis < rank:
                raise ExportError(
                    f"{origin} declares axis {axis} of '{name}' dynamic, which has {rank} axes",
                    HOW_DYNAMIC,
                )
            if value is not None:
                found[name][axis % rank] = _axis(origin, name, axis % rank, value)
    return found


def _axis(origin: str, name: str, axis: int, value: Any) -> Axis:
    low, high = 1, BATCH.max
    if isinstance(value, Axis):
        return value
    if isinstance(value, str):
        return Axis(value, low, high)
    if isinstance(value, type) or hasattr(value, "__name__"):  # torch.export.Dim
        low, high = getattr(value, "min", low), getattr(value, "max", high)
        bounded = high if isinstance(high, int) and high < 2**31 else BATCH.max
        return Axis(str(value.__name__), max(1, int(low or 1)), bounded)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        low, high = value
        if isinstance(low, int) and isinstance(high, int) and 0 < low < high:
            return Axis(f"{name}_{axis}", low, high)
    if repr(value).startswith(("_DimHint", "DimHint")):  # Dim.AUTO and Dim.DYNAMIC carry no name
        return Axis("batch" if axis == 0 else f"{name}_{axis}", low, high)
    raise ExportError(
        f"{origin} declares axis {axis} of '{name}' as {value!r}",
        "use a name, a torch.export.Dim or (min, max) with 1 <= min < max",
    )


def default_dynamic(inputs: Mapping[str, Tensor]) -> dict[str, dict[int, Axis]]:
    """The batch: axis 0, where all inputs that have axes agree on its size."""
    sizes = {value.shape[0] for value in inputs.values() if value.dim()}
    if len(sizes) != 1:
        return {}
    return {name: {0: BATCH} for name, value in inputs.items() if value.dim()}


def parse_input(option: str) -> tuple[str, Tensor]:
    """`NAME=DTYPE[SIZE,...]` -> name and a seeded example.

    Raises:
        UsageError: malformed, or an unknown dtype.
    """
    match = re.fullmatch(r"(\w+)=(\w+)\[([\d,\s]*)\]", option)
    dtype = getattr(torch, match[2], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input {option} does not parse", "write image=float32[2,3,224,224]")
    shape = [int(size) for size in match[3].split(",") if size.strip()]
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return match[1], torch.randn(shape, generator=generator).to(dtype)
    return match[1], torch.randint(0, 2, shape, generator=generator).to(dtype)


def parse_dynamic(option: str) -> tuple[str, int, Axis]:
    """`INPUT=AXIS:MIN..MAX`, or `INPUT=AXIS:NAME:MIN..MAX` for axes that are equal.

    Raises:
        UsageError: malformed.
    """
    match = re.fullmatch(r"(\w+)=(\d+):(?:(\w+):)?(\d+)\.\.(\d+)", option)
    if match is None or not 0 < int(match[4]) < int(match[5]):
        raise UsageError(f"--dynamic {option} does not parse", "write image=0:1..64")
    axis = int(match[2])
    name = match[3] or ("batch" if axis == 0 else f"{match[1]}_{axis}")
    return match[1], axis, Axis(name, int(match[4]), int(match[5]))
