"""com.microsoft MultiHeadAttention: attention over three separate projections."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.attention.lower.operands import Operand, operands
from attn_export.attention.lower.rewrite import (
    Rewrite,
    initializer,
    merged_output,
    require_plain,
    tag,
)
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site

NAME = "com.microsoft.MultiHeadAttention"


def build(site: Site) -> Rewrite:
    """Three MatMul and Add, each with its own columns of the weights, and the node.

    Query (B, S, N * H), key (B, T, N * H), value (B, T, N * Hv).
    Specification: ONNX Runtime contrib operators, com.microsoft.MultiHeadAttention.

    Raises:
        NotLowerable: the site is not expressible by this op.
    """
    require_plain(site, "MultiHeadAttention")
    if site.causal != "none" and site.query_tokens != site.key_tokens:
        raise NotLowerable(
            Reason.CAUSAL, "MultiHeadAttention's causal mask is wrong where S differs from T"
        )
    parts = dict(zip(("query", "key", "value"), operands(site), strict=True))
    old = merged_output(site)
    nodes: list[ir.Node] = []
    weights: list[ir.Value] = []
    inputs = [_project(site, role, part, nodes, weights) for role, part in parts.items()]
    node = ir.node(
        "MultiHeadAttention",
        inputs,
        attributes={
            "num_heads": site.heads,
            "scale": site.scale,
            "unidirectional": int(site.causal == "upper-left"),
        },
        domain="com.microsoft",
    )
    nodes.append(tag(site, node))
    new = node.outputs[0]
    new.shape, new.type = old.shape, old.type
    sources = list({id(p.source): p.source for p in parts.values()}.values())
    return Rewrite(NAME, sources, old, new, nodes, weights)


def _project(
    site: Site, role: str, part: Operand, nodes: list[ir.Node], weights: list[ir.Value]
) -> ir.Value:
    weight = initializer(f"{site.name}/{role}.weight", part.weight)
    product = tag(site, ir.node("MatMul", [part.source, weight]))
    product.name = f"{site.name}/{role}"
    weights.append(weight)
    nodes.append(product)
    shape = part.source.shape
    result = product.outputs[0]
    if part.bias.any():
        bias = initializer(f"{site.name}/{role}.bias", part.bias)
        weights.append(bias)
        total = tag(site, ir.node("Add", [result, bias]))
        total.name = f"{site.name}/{role}/bias"
        nodes.append(total)
        result = total.outputs[0]
    for node in nodes[-2:]:
        node.outputs[0].type = part.source.type
        if shape is not None:
            node.outputs[0].shape = ir.Shape([*shape[:-1], part.weight.shape[1]])
    return result
