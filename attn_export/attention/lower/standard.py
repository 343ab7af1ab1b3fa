"""ai.onnx Attention, its mask expanded to the query and key axes as the kernels want it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.attention.lower.rewrite import NotLowerable, Rewrite, initializer, tag
from attn_export.attention.site import Site

NAME = "ai.onnx.Attention"


def build(site: Site) -> Rewrite:
    """The same node; in front of it an Expand of the mask to (…, S, T) where it is smaller.

    ONNX's Attention broadcasts any mask, ONNX Runtime's kernels only the batch and head axes.
    Specification: ONNX operator Attention, opset 23.

    Raises:
        NotLowerable: the site has a window, which this op lacks.
    """
    if site.window is not None:
        raise NotLowerable("ai.onnx Attention has no window")
    old = site.node.outputs[0]
    sources = [value for value in site.node.inputs if value is not None]
    inputs = list(site.node.inputs)
    nodes: list[ir.Node] = []
    weights: list[ir.Value] = []
    mask = inputs[3] if len(inputs) > 3 else None
    if mask is not None and not _is_full(mask, site):
        inputs[3] = _expand(site, mask, nodes, weights)
    attributes = {
        name: attribute.value
        for name, attribute in site.node.attributes.items()
        if not attribute.is_ref()
    }
    node = ir.node("Attention", inputs, attributes=attributes, version=site.node.version)
    nodes.append(tag(site, node))
    new = node.outputs[0]
    new.shape, new.type = old.shape, old.type
    unique = list({id(value): value for value in sources}.values())
    return Rewrite(NAME, unique, old, new, nodes, weights)


def _is_full(mask: ir.Value, site: Site) -> bool:
    if mask.shape is None or len(mask.shape) < 2:
        return False
    found = [size if isinstance(size, int) else str(size.value) for size in mask.shape[-2:]]
    return found == [site.query_tokens, site.key_tokens]


def _expand(site: Site, mask: ir.Value, nodes: list[ir.Node], weights: list[ir.Value]) -> ir.Value:
    """Expand(mask, [1, 1, S, T]): Expand broadcasts both ways, so other axes keep their sizes."""
    ones = initializer(f"{site.name}/mask.ones", np.ones(2, dtype=np.int64))
    weights.append(ones)
    parts: list[ir.Value | None] = [ones]
    for role, value in zip(("query", "key"), site.node.inputs[:2], strict=True):
        rank = 3 if value is None or value.shape is None else len(value.shape)
        axis = rank - 2
        shape = ir.node("Shape", [value], attributes={"start": axis, "end": axis + 1})
        tag(site, shape).name = f"{site.name}/mask/{role}_tokens"
        nodes.append(shape)
        parts.append(shape.outputs[0])
    joined = ir.node("Concat", parts, attributes={"axis": 0})
    tag(site, joined).name = f"{site.name}/mask/shape"
    expanded = ir.node("Expand", [mask, joined.outputs[0]])
    tag(site, expanded).name = f"{site.name}/mask"
    nodes += [joined, expanded]
    expanded.outputs[0].type = mask.type
    return expanded.outputs[0]
