"""com.microsoft MultiHeadAttention: attention over query, key and value apart."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.layout import existing
from attn_export.attention.lower.bias import score_bias
from attn_export.attention.lower.cache import Cache, cache_of
from attn_export.attention.lower.contrib import (
    BLOCKS,
    finish,
    fused,
    lengths_of,
    require_equal_heads,
    require_plain,
    unidirectional,
)
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.lower.site_inputs import builder, operand_of
from attn_export.attention.lower.tokens_first import TokensFirst, tokens_first
from attn_export.attention.site import Site
from attn_export.attention.sizes import sizes

NAME = "com.microsoft.MultiHeadAttention"
AS_IT_IS = ((0,), (1,), (2,), (3,))


def build(site: Site) -> Rewrite:
    """Query (B, S, N * H), key (B, T, N * H) and value (B, T, N * Hv) in front of one node.

    Keys and values that lie (B, N, T, H) are given as they are, which the op takes too. With a
    cache the node gets past keys and values (B, N, P, H) and gives the present ones: it is wrong
    on a CPU where they are not asked for. Lengths are given as they are; any other mask becomes the
    bias on scores, see `score_bias`.
    Specification: ONNX Runtime contrib operators, com.microsoft.MultiHeadAttention.

    Raises:
        NotLowerable: the site is not expressible by this op.
    """
    require_plain(site, "MultiHeadAttention")
    require_equal_heads(site, "MultiHeadAttention")
    cache = cache_of(site)
    causal = unidirectional(site, cache)
    b = builder(site)
    query = tokens_first(b, operand_of(site, 0), "query", site.heads)
    key, value = _keys_and_values(b, site, cache)
    axis = 1 if len(sizes(key.value)) == 3 else 2
    keys = [(key.value, axis)] if cache is None else [(cache.past_key, 2), (key.value, axis)]
    lengths = lengths_of(site, cache)
    bias = None if causal or lengths is not None else score_bias(b, site, query.value, keys)
    past = (None, None) if cache is None else (cache.past_key, cache.past_value)
    inputs: list[ir.Value | None] = [
        query.value, key.value, value.value, None, lengths,
        None if bias is None else bias.value, *past,
    ]  # fmt: skip
    while inputs[-1] is None:
        inputs.pop()
    shape = (*sizes(query.value)[:2], site.heads * site.v_head_size)
    attributes = {
        "num_heads": site.heads, "scale": site.scale, "unidirectional": int(causal)
    }  # fmt: skip
    if lengths is not None:
        attributes["mask_filter_value"] = BLOCKS
    outputs = 1 if cache is None else 3
    node = fused(b, site, "MultiHeadAttention", inputs, shape, attributes, outputs)
    sources = [query.source, key.source, value.source]
    return finish(b, site, NAME, node, sources, bias, cache)


def _keys_and_values(
    b: Builder, site: Site, cache: Cache | None
) -> tuple[TokensFirst, TokensFirst]:
    """(B, T, N * H) each, or (B, N, T, H) each where one would have to be moved for the other."""
    given = (operand_of(site, 1), operand_of(site, 2))
    new = given if cache is None else (cache.key, cache.value)
    nodes, weights = len(b.nodes), len(b.weights)
    key = tokens_first(b, new[0], "key", site.heads)
    value = tokens_first(b, new[1], "value", site.heads)
    same = site.head_size == site.v_head_size  # the op wants it in this form
    if cache is None and same and (key.heads_first or value.heads_first):
        del b.nodes[nodes:], b.weights[weights:]
        key, value = (TokensFirst(v, v) for v in (existing(part, AS_IT_IS) or part for part in new))
    return key, value
