"""ai.onnx Attention, its mask in the form that the kernels take and that keeps the answers."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.attention.lower.mask import boundary, kernel_mask
from attn_export.attention.lower.rewrite import Rewrite, tag
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site

NAME = "ai.onnx.Attention"


def build(site: Site) -> Rewrite:
    """The same node; in front of it what its mask needs, see `kernel_mask`.

    Specification: ONNX operator Attention, opset 23.

    Raises:
        NotLowerable: the site has a window, which this op lacks.
    """
    if site.window is not None:
        raise NotLowerable(Reason.WINDOW, "ai.onnx Attention has no window")
    old = site.node.outputs[0]
    inputs = list(site.node.inputs)
    nodes: list[ir.Node] = []
    weights: list[ir.Value] = []
    mask = inputs[3] if len(inputs) > 3 else None
    query, key = inputs[0], inputs[1]
    if mask is not None and query is not None and key is not None:
        inputs[3], nodes, weights = kernel_mask(site.name, mask, query, key)
    attributes = {
        name: attribute.value
        for name, attribute in site.node.attributes.items()
        if not attribute.is_ref()
    }
    node = ir.node("Attention", inputs, attributes=attributes, version=site.node.version)
    nodes.append(tag(site, node))
    new = node.outputs[0]
    new.shape, new.type = old.shape, old.type
    sources, given = boundary(site)
    return Rewrite(NAME, sources, old, new, nodes, weights, given)
