"""Make each softmax attention one standard Attention node, proved before it is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attn_export.attention.apply import apply, drop_unused_initializers
from attn_export.attention.data import depends_on_input, mask_sources
from attn_export.attention.einsum import products_for_einsums
from attn_export.attention.handwritten import Parts, parts
from attn_export.attention.lower.mask import kernel_mask
from attn_export.attention.lower.rewrite import Rewrite, initializer
from attn_export.attention.metadata import MODULE, ORIGIN
from attn_export.attention.reasons import NotLowerable, Reason

NAME = "ai.onnx.Attention"


@dataclass
class Canonicalised:
    """What `canonicalise` did, by the names of the softmax nodes."""

    replaced: set[str] = field(default_factory=set)
    refused: dict[str, NotLowerable] = field(default_factory=dict)


def canonicalise(
    model: ir.Model, wanted: Sequence[str], sizes: Sequence[Mapping[str, int]]
) -> Canonicalised:
    """Replace hand-written attention in the main graph by standard Attention nodes.

    Args:
        wanted: names of the softmax nodes that weigh values.
        sizes: as `prove` takes them.
    """
    result = Canonicalised()
    products_for_einsums(model)
    names = set(wanted)
    for node in [n for n in model.graph if n.op_type == "Softmax" and n.name in names]:
        try:
            apply(model, _build(node, parts(node)), sizes)
        except NotLowerable as reason:
            result.refused[str(node.name)] = reason
        else:
            result.replaced.add(str(node.name))
    if result.replaced:
        RemoveUnusedNodesPass()(model)
        drop_unused_initializers(model)
    return result


class _Builder:
    """Collects the new nodes of one site; each carries the softmax's origin."""

    def __init__(self, softmax: ir.Node) -> None:
        self.softmax = softmax
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []

    def op(
        self, op_type: str, inputs: list[ir.Value | None], shape: ir.Shape | None, like: ir.Value,
        **attributes: int | float | list[int],
    ) -> ir.Value:  # fmt: skip
        node = ir.node(op_type, inputs, attributes=attributes or None)
        node.name = f"{self.softmax.name}/{op_type}_{len(self.nodes)}"
        for key in (MODULE, ORIGIN):
            if key in self.softmax.metadata_props:
                node.metadata_props[key] = self.softmax.metadata_props[key]
        node.outputs[0].shape, node.outputs[0].type = shape, like.type
        self.nodes.append(node)
        return node.outputs[0]

    def unsqueeze(self, value: ir.Value, axes: list[int]) -> ir.Value:
        name = f"{self.softmax.name}/axes_{len(self.weights)}"
        numbers = initializer(name, np.array(axes, dtype=np.int64))
        self.weights.append(numbers)
        sizes = list(value.shape) if value.shape is not None else []
        for axis in axes:
            sizes.insert(axis, 1)
        return self.op("Unsqueeze", [value, numbers], ir.Shape(sizes), value)

    def ordered(self, value: ir.Value, perm: tuple[int, ...]) -> ir.Value:
        if list(perm) == sorted(perm):
            return value
        sizes = list(value.shape or ())
        shape = ir.Shape([sizes[axis] for axis in perm])
        return self.op("Transpose", [value], shape, value, perm=list(perm))


def _rank(value: ir.Value) -> int:
    if value.shape is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, f"the rank of '{value.name}' is unknown")
    return len(value.shape)


def _build(softmax: ir.Node, found: Parts) -> Rewrite:
    """Query, key and value as (B, N, S, H); without a head axis they get one of size 1."""
    b = _Builder(softmax)
    rank = _rank(found.query)
    if not 2 <= rank <= 4 or _rank(found.key) != rank or _rank(found.value) != rank:
        raise NotLowerable(
            Reason.LAYOUT, "its queries, keys and values are not of one rank from 2 to 4"
        )
    key, mask = b.ordered(found.key, found.key_perm), found.mask
    value = b.ordered(found.value, found.value_perm)
    new_axes = {2: [0, 1], 3: [1], 4: []}[rank]
    query, key, value = (
        b.unsqueeze(v, new_axes) if new_axes else v for v in (found.query, key, value)
    )
    if _sizes(query)[:2] != _sizes(key)[:2] or _sizes(key)[:2] != _sizes(value)[:2]:
        raise NotLowerable(
            Reason.LAYOUT, "its queries, keys and values broadcast over batch or heads"
        )
    if mask is not None and found.inverted:
        mask = b.op("Not", [mask], mask.shape, mask)
    if mask is not None and rank == 3 and _rank(mask) == 3:
        mask = b.unsqueeze(mask, [1])
    if mask is not None:
        mask, nodes, weights = kernel_mask(str(softmax.name), mask, query, key)
        b.nodes += nodes
        b.weights += weights
    attributes: dict[str, float] = {"scale": found.scale}
    if found.softcap:
        attributes["softcap"] = found.softcap
    out_sizes = [*list(query.shape or [])[:-1], list(value.shape or [])[-1]]
    inputs: list[ir.Value | None] = [query, key, value]
    new = b.op(
        "Attention", inputs if mask is None else [*inputs, mask], ir.Shape(out_sizes), query,
        **attributes,
    )  # fmt: skip
    attention = b.nodes[-1]
    if found.flipped:
        swapped = ir.Shape([*out_sizes[:2], out_sizes[3], out_sizes[2]])
        new = b.op("Transpose", [new], swapped, query, perm=[0, 1, 3, 2])
    if new_axes:
        axes = initializer(f"{softmax.name}/axes_out", np.array(new_axes, dtype=np.int64))
        b.weights.append(axes)
        new = b.op("Squeeze", [new, axes], found.output.shape, query)
    attention.name = f"{softmax.name}/attention"
    operands = (found.query, found.key, found.value)
    sources = [value for value in operands if depends_on_input(value)]
    cut = mask_sources(found.mask) if found.mask is not None else []
    unique = list({id(v): v for v in [*sources, *cut]}.values())
    return Rewrite(NAME, unique, found.output, new, b.nodes, b.weights, found.mask)


def _sizes(value: ir.Value) -> list[int | str]:
    return [s if isinstance(s, int) else str(s.value) for s in value.shape or ()]
