"""Sizes and inputs that PyTorch is run with: several of each range, masked and unmasked."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from attn_export import right_padded
from attn_export.models.spec import Axis, ExportSpec
from attn_export.parity.generate import TOKEN

SIZES = {"batch": (1, 3, 2), "other": (7, 12, 5)}
LARGEST = 1024  # positions of a case at the upper end of the declared lengths
CACHE_BYTES = 16_000_000  # that a case's caches take; each goes in, comes out, and has a truth


def sizes_of(spec: ExportSpec) -> list[dict[str, int]]:
    """Two to four assignments of sizes to the dynamic axes, batch 1 and 3 among them.

    The first two differ from the example in every axis that has room to; the last one is the
    example's own. Each size lies inside the declared range.
    """
    axes = {axis.name: axis for row in spec.dynamic.values() for axis in row.values()}
    if not axes:
        return [{}]
    example = example_sizes(spec)
    near = example | _shorter_past(spec, example)
    picked = [
        {name: _pick(axis, index, near[name]) for name, axis in axes.items()} for index in (0, 1)
    ]
    # Lengths that grow together never show a query longer than its keys: cross them once.
    lengths = [name for name in axes if name != "batch"]
    crossed = picked[1] | {name: picked[0][name] for name in lengths[1:]}
    unique: list[dict[str, int]] = []
    for wanted in [*picked, *([crossed] if len(lengths) > 1 else []), example]:
        for sizes in within_capacity(spec, wanted):
            if sizes not in unique:
                unique.append(sizes)
    return unique


def cache_bytes(spec: ExportSpec, sizes: Mapping[str, int]) -> int:
    """What the caches that go into one call take, in bytes."""
    total = 0
    for given in {spec.parameter(given) for _, given, _ in spec.state}:
        example, axes = spec.inputs[given], spec.dynamic.get(given, {})
        shape = [sizes[axes[i].name] if i in axes else size for i, size in enumerate(example.shape)]
        total += math.prod(shape) * example.element_size()
    return total


def _shorter_past(spec: ExportSpec, example: Mapping[str, int]) -> dict[str, int]:
    """The past that other cases are near to, where the example's would make them too large."""
    past, _ = cache_axes(spec)
    if past not in example:
        return {}
    rows = {"batch": max(SIZES["batch"])} if "batch" in example else {}
    each = cache_bytes(spec, {**example, **rows, past: 1})
    return {past: min(example[past], max(CACHE_BYTES // max(each, 1), SIZES["other"][0]))}


def within_capacity(spec: ExportSpec, sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """The sizes, or what of them fits caches that have a capacity.

    Several new tokens of several rows come without a past, as `fixed_caches` has it; they give two
    assignments, one without a past and one with a token a row.
    """
    past, new = cache_axes(spec)
    if spec.cache_capacity is None or past not in sizes:
        return [dict(sizes)]
    tokens = sizes.get(new, 1)
    room = dict(sizes) | {past: max(min(sizes[past], spec.cache_capacity - tokens), 0)}
    if not room[past] or tokens == 1 or sizes.get("batch", 1) == 1:
        return [room]
    return [room | {past: 0}, room | {new: 1}]


def with_past(spec: ExportSpec) -> list[dict[str, int]]:
    """Those of `sizes_of` that have a past, and one row with several tokens behind one."""
    past, new = cache_axes(spec)
    found = [sizes for sizes in sizes_of(spec) if sizes[past]]
    example = example_sizes(spec)
    if "batch" in example and spec.cache_capacity and example.get(new, 1) > 1:
        room = spec.cache_capacity - example[new]
        found.append(example | {"batch": 1, past: min(max(example[past], 1), room)})
    return [sizes for index, sizes in enumerate(found) if sizes not in found[:index]]


def cache_axes(spec: ExportSpec) -> tuple[str, str]:
    """What the cached and the new tokens are called; empty where there are none."""
    axes = spec.axes()
    caches = (axes.get(given, {}).get(place) for _, given, place in spec.state)
    past = next((axis.name for axis in caches if axis is not None and axis.name != "batch"), "")
    own = axes.get(TOKEN, {}).get(1)
    return past, "" if own is None else own.name


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
    if spec.cache_capacity is not None:
        high |= {name: 1 for name in cache_axes(spec)[1:] if name in high}
    note, ends = "", [low]
    if math.prod(high[name] for name in lengths) <= LARGEST:
        ends.append(high)
    else:
        told = " ".join(f"{name}={high[name]}" for name in lengths)
        note = f"the largest declared sizes ({told}) were not run, they take too long for a check"
    fitting = [fit for sizes in ends for fit in within_capacity(spec, sizes)]
    return [sizes for sizes in fitting if sizes not in sizes_of(spec)], note


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
