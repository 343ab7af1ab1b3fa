"""ai.onnx Attention, its mask in the form that the kernels take and that keeps the answers."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.data import is_computed, mask_sources
from attn_export.attention.layout import existing
from attn_export.attention.lower.cache import PAST_KEY
from attn_export.attention.lower.contrib import MASK, builder, mask_of, operand_of
from attn_export.attention.lower.mask import as_given, kernel_mask
from attn_export.attention.lower.output import merges_heads, place
from attn_export.attention.lower.rewrite import Rewrite, tag
from attn_export.attention.lower.tokens_first import TokensFirst, tokens_first
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site
from attn_export.attention.sizes import sizes

NAME = "ai.onnx.Attention"
ROLES = ("query", "key", "value")
MOVES = {"Transpose", "MatMul"}  # moved or computed anew


def build(site: Site) -> Rewrite:
    """The same node; in front of it what its mask needs, see `kernel_mask`.

    Query, key and value whose heads were split by layout nodes are given as they were before, in
    the node's 3-D form, where the heads are merged behind it as well.
    Specification: ONNX operator Attention, opset 23.

    Raises:
        NotLowerable: the site has a window without a mask that says it.
    """
    if site.window is not None and mask_of(site) is None:
        raise NotLowerable(Reason.WINDOW, "ai.onnx Attention has no window")
    node = site.node
    operands = [operand_of(site, index) for index in range(3)]
    packed = _packed(site, operands)
    unmoved = [TokensFirst(v, v) for v in map(_unmoved, operands)]
    b, parts = (builder(site), unmoved) if packed is None else packed
    query, key = parts[0].value, parts[1].value
    inputs = [*(part.value for part in parts), *node.inputs[3:]]
    mask = mask_of(site)
    given = None if mask is None else as_given(mask)
    flagged = site.exact and site.window is None and site.query_tokens == site.key_tokens
    if flagged:  # a flag keeps the fast kernels, a dense mask does not
        inputs = inputs[:MASK]
    elif given is not None:
        past = node.inputs[PAST_KEY] if len(node.inputs) > PAST_KEY else None
        inputs[MASK], nodes, weights = kernel_mask(site.name, given, query, key, past)
        b.nodes += nodes
        b.weights += weights
    attributes = {name: a.value for name, a in node.attributes.items() if not a.is_ref()}
    if flagged:
        attributes["is_causal"] = 1
    if packed is not None:
        attributes |= {"q_num_heads": site.heads, "kv_num_heads": site.kv_heads}
    fused = ir.node(
        "Attention", inputs, attributes=attributes, version=node.version,
        num_outputs=len(node.outputs),
    )  # fmt: skip
    b.nodes.append(tag(site, fused))
    old, new = node.outputs[0], fused.outputs[0]
    new.shape, new.type = old.shape, old.type
    if packed is not None:
        shape = (*sizes(query)[:2], site.heads * site.v_head_size)
        new.shape = ir.Shape([s if isinstance(s, int) else str(s) for s in shape])
        old, new = place(b, old, new)
        new.shape, new.type = old.shape, old.type
    also = list(zip(node.outputs[1:], fused.outputs[1:], strict=True))
    for before, after in also:
        after.shape, after.type = before.shape, before.type
    sources = [part.source for part in parts] + [v for v in node.inputs[4:] if v is not None]
    cut = mask_sources(given) if given is not None else []
    begins = [*(v for v in sources if is_computed(v)), *cut]
    unique = list({id(value): value for value in begins}.values())
    return Rewrite(NAME, unique, old, new, b.nodes, b.weights, given, also)


def _packed(site: Site, operands: Sequence[ir.Value]) -> tuple[Builder, list[TokensFirst]] | None:
    """Query, key and value as (B, tokens, heads * size), where this moves nothing.

    None also where the graph does not merge the heads behind the site: 4-D is what it wants then.
    """
    if all(len(sizes(value)) == 3 for value in operands):
        return builder(site), [TokensFirst(value, value) for value in operands]
    if not site.head_size or not site.v_head_size:
        return None
    b = builder(site)
    heads = (site.heads, site.kv_heads, site.kv_heads)
    parts = [
        tokens_first(b, value, role, count)
        for value, role, count in zip(operands, ROLES, heads, strict=True)
    ]
    moved = any(node.op_type in MOVES for node in b.nodes)
    return None if moved or not merges_heads(site.node.outputs[0]) else (b, parts)


def _unmoved(value: ir.Value) -> ir.Value:
    """The farthest value that holds the same elements in the same place."""
    rank = len(sizes(value))
    return existing(value, [(axis,) for axis in range(rank)]) or value
