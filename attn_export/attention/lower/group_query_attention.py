"""com.microsoft GroupQueryAttention: causal attention whose queries share keys and values."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.lower.bias import score_bias, total
from attn_export.attention.lower.cache import Cache, cache_of
from attn_export.attention.lower.contrib import finish, fused, lengths_of, require_plain
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.lower.site_inputs import builder, mask_of, operand_of
from attn_export.attention.lower.tokens_first import TokensFirst, tokens_first
from attn_export.attention.lower.turned import turned
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site
from attn_export.attention.sizes import sizes

NAME = "com.microsoft.GroupQueryAttention"
BIAS = 10
"""Its input for a bias on scores."""


def build(site: Site, *, turning: bool = False, first: bool = False) -> Rewrite:
    """Query (B, S, N * H), key and value (B, S, K * H), and the numbers of keys so far.

    The op is causal, its queries counted from the end of the past, whatever it is given beside. A
    mask of sizes alone that is no more than causal, or a causal window, is left to it; lengths are
    the numbers of keys that it is given; any other mask becomes the bias on scores as well, see
    `score_bias`.
    Specification: ONNX Runtime contrib operators, com.microsoft.GroupQueryAttention.

    Args:
        turning: let the op turn queries and keys, which RotaryEmbedding did, see `turned`.
        first: whoever calls the graph gives several rows several tokens only where there is no
            past, which is all that the op takes.

    Raises:
        NotLowerable: the site is not causal, or not expressible by this op.
    """
    require_plain(site, "GroupQueryAttention")
    if site.heads % site.kv_heads or site.head_size != site.v_head_size:
        raise NotLowerable(Reason.HEADS, "GroupQueryAttention has no heads of these sizes")
    cache = cache_of(site)
    _require_causal(site, cache, first)
    b = builder(site)
    query = tokens_first(b, operand_of(site, 0), "query", site.heads)
    new = (operand_of(site, 1), operand_of(site, 2)) if cache is None else (cache.key, cache.value)
    key = tokens_first(b, new[0], "key", site.kv_heads)
    value = tokens_first(b, new[1], "value", site.kv_heads)
    rotary = turned(b, query.value, key.value, site.head_size, cache) if turning else None
    if rotary is not None:
        query, key = (TokensFirst(v, v) for v in (rotary.query, rotary.key))
    keys = [(key.value, 1)] if cache is None else [(cache.past_key, 2), (key.value, 1)]
    rows = lengths_of(site, cache)
    lengths, longest = _lengths(b, query.value, total(b, keys), rows)
    mask = mask_of(site)
    known = mask is None or site.exact or rows is not None
    bias = None if known else score_bias(b, site, query.value, keys)
    past = (None, None) if cache is None else (cache.past_key, cache.past_value)
    sources = [query.source, key.source, value.source]
    inputs: list[ir.Value | None] = [query.value, key.value, value.value, *past, lengths, longest]
    if rotary is not None:
        inputs += [rotary.cos, rotary.sin]
        sources += rotary.sources
    if bias is not None:
        inputs += [None] * (BIAS - len(inputs)) + [bias.value]
    attributes = {
        "num_heads": site.heads, "kv_num_heads": site.kv_heads, "scale": site.scale,
        "softcap": site.softcap,
        # counts the query itself, as the site's window does
        "local_window_size": -1 if site.window is None else site.window,
    }  # fmt: skip
    if rotary is not None:
        attributes |= {"do_rotary": 1, "rotary_interleaved": rotary.interleaved}
    node = fused(b, site, "GroupQueryAttention", inputs, sizes(query.value), attributes, 3)
    return finish(b, site, NAME, node, sources, bias, cache)


def build_turning(site: Site) -> Rewrite:
    """As `build`, with the rotation of queries and keys inside of the op."""
    return build(site, turning=True)


def build_first(site: Site) -> Rewrite:
    """As `build`, where several rows bring several tokens only before there is a past."""
    return build(site, first=True)


def build_first_turning(site: Site) -> Rewrite:
    """As `build_first`, with the rotation inside of the op."""
    return build(site, turning=True, first=True)


def _require_causal(site: Site, cache: Cache | None, first: bool) -> None:
    """Raise NotLowerable unless each query sees no key behind itself, counted as the op does."""
    flag = bool(site.node.attributes.get_int("is_causal", 0))
    if cache is None:
        causal = flag or site.causal in ("upper-left", "lower-right")
        aligned = site.query_tokens == site.key_tokens
    else:
        causal = flag or site.causal == "lower-right"
        aligned = cache.aligned if flag else True
    if not causal:
        raise NotLowerable(
            Reason.CAUSAL, "GroupQueryAttention is always causal, and it is not known to be"
        )
    if not aligned:
        raise NotLowerable(Reason.CAUSAL, "its causal mask is not aligned as GroupQueryAttention's")
    batch = sizes(operand_of(site, 0))[0]
    if cache is not None and not first and site.query_tokens != 1 and batch != 1:
        raise NotLowerable(
            Reason.CACHE, "GroupQueryAttention takes several new tokens at batch 1 alone"
        )


def _lengths(
    b: Builder, query: ir.Value, tokens: ir.Value, given: ir.Value | None
) -> tuple[ir.Value, ir.Value]:
    """The number of keys of each row less 1, int32 (B,), and that of all, an int32 scalar."""
    int32 = ir.DataType.INT32
    scalar = b.op("Squeeze", [tokens], [], ir.DataType.INT64)
    longest = b.op("Cast", [scalar], [], int32, to=int(int32))
    if given is not None:
        return b.op("Sub", [given, b.constant(np.array(1, np.int32))], sizes(given)), longest
    batch = b.op("Shape", [query], [1], ir.DataType.INT64, start=0, end=1)
    one = b.constant(np.array(1, dtype=np.int64))
    less = b.op("Sub", [tokens, one], [1], ir.DataType.INT64)
    rows = b.op("Expand", [less, batch], [sizes(query)[0]], ir.DataType.INT64)
    return b.op("Cast", [rows], sizes(rows), int32, to=int(int32)), longest
