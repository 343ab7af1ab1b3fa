"""ai.onnx Attention, its mask in the form that the kernels take and that keeps the answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.data import is_computed, unique
from attn_export.attention.layout import chain, existing
from attn_export.attention.lower.cache import PAST_KEY, cache_of
from attn_export.attention.lower.mask import as_given, kernel_mask
from attn_export.attention.lower.output import place
from attn_export.attention.lower.rewrite import Rewrite, outputs_of, tag
from attn_export.attention.lower.site_inputs import LENGTHS, MASK, builder, mask_of, operand_of
from attn_export.attention.lower.tokens_first import TokensFirst, tokens_first
from attn_export.attention.masks import mask_sources
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site
from attn_export.attention.sizes import shape_of, sizes

NAME = "ai.onnx.Attention"
ROLES = ("query", "key", "value")


def build(site: Site) -> Rewrite:
    """The same node; in front of it what its mask needs, see `kernel_mask`.

    Query, key and value whose heads were split by layout nodes are given as they were before, in
    the node's 3-D form, unless that would cost more Transposes than it saves; those of a cache are
    of all tokens so far, so that it stays as it is.
    Lengths are its nonpad_kv_seqlen, which it has from opset 24 on.
    Specification: ONNX operator Attention, opset 23 and 24.

    Raises:
        NotLowerable: the site has a window without a mask that says it, or lengths that are causal
            as well: the node would count each row's queries from the end of its keys.
    """
    if site.lengths is not None and site.causal != "none":
        raise NotLowerable(Reason.CAUSAL, "its causal mask is not aligned as ai.onnx Attention's")
    if site.window is not None and mask_of(site) is None:
        raise NotLowerable(Reason.WINDOW, "ai.onnx Attention has no window")
    operands = [operand_of(site, index) for index in range(3)]
    given = [TokensFirst(v, v) for v in map(_unmoved, operands)]
    rank = {len(sizes(value)) for value in operands}
    if rank == {4} and site.head_size and site.v_head_size and cache_of(site) is None:
        heads = (site.heads, site.kv_heads, site.kv_heads)
        b = builder(site)
        parts = [tokens_first(b, *part) for part in zip(operands, ROLES, heads, strict=True)]
        packed = _rewrite(b, site, parts)
        merged = packed.old is not site.node.outputs[0]
        if merged and _transposes(packed.nodes) <= _transposes(_replaced(operands, packed.old)):
            return packed
    return _rewrite(builder(site), site, given)


def _rewrite(b: Builder, site: Site, parts: Sequence[TokensFirst]) -> Rewrite:
    node = site.node
    query, key = parts[0].value, parts[1].value
    inputs = [*(part.value for part in parts), *node.inputs[3:]]
    mask = mask_of(site)
    given = None if mask is None else as_given(mask)
    flagged = site.exact and site.window is None and site.query_tokens == site.key_tokens
    if site.lengths is not None:
        int64 = ir.DataType.INT64
        rows = b.op("Cast", [site.lengths], sizes(site.lengths), int64, to=int(int64))
        inputs += [None] * (LENGTHS + 1 - len(inputs))
        inputs[MASK], inputs[LENGTHS] = None, rows
    elif flagged:  # a flag keeps the fast kernels, a dense mask does not
        inputs[MASK] = None
    elif given is not None:
        past = node.inputs[PAST_KEY] if len(node.inputs) > PAST_KEY else None
        inputs[MASK], nodes, weights = kernel_mask(site.name, given, query, key, past)
        b.nodes += nodes
        b.weights += weights
    while inputs[-1] is None:
        inputs.pop()
    attributes = {name: a.value for name, a in node.attributes.items() if not a.is_ref()}
    if flagged:
        attributes["is_causal"] = 1
    packed = len(sizes(query)) == 3
    if packed:
        attributes |= {"q_num_heads": site.heads, "kv_num_heads": site.kv_heads}
    fused = ir.node(
        "Attention", inputs, attributes=attributes, version=node.version,
        num_outputs=len(node.outputs),
    )  # fmt: skip
    b.nodes.append(tag(site, fused))
    pairs = outputs_of(node, fused)
    if packed:
        merged = fused.outputs[0]
        shape = (*sizes(query)[:2], site.heads * site.v_head_size)
        merged.shape = shape_of(shape)
        merged.type = node.outputs[0].type
        pairs[0] = place(b, node.outputs[0], merged)
    for before, after in pairs:
        after.shape, after.type = before.shape, before.type
    sources = [part.source for part in parts] + [v for v in node.inputs[4:] if v is not None]
    cut = mask_sources(given) if given is not None else []
    begins = [*(v for v in sources if is_computed(v)), *cut]
    return Rewrite(NAME, unique(begins), *pairs[0], b.nodes, b.weights, given, pairs[1:])


def _unmoved(value: ir.Value) -> ir.Value:
    """The farthest value that holds the same elements in the same place."""
    rank = len(sizes(value))
    return existing(value, [(axis,) for axis in range(rank)]) or value


def _replaced(operands: Sequence[ir.Value], result: ir.Value) -> set[ir.Node]:
    """The nodes that the 3-D form makes superfluous: layouts in front, and all behind."""
    behind = [source.producer() for value in operands for source in chain(_unmoved(value))[:-1]]
    node = result.producer()
    while node is not None and node.op_type != "Attention":
        behind.append(node)
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return {node for node in behind if node is not None}


def _transposes(nodes: Collection[ir.Node]) -> int:
    return sum(node.op_type == "Transpose" for node in nodes)
