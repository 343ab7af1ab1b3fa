"""What the lowerings to com.microsoft ops share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.data import is_computed, unique
from attn_export.attention.lower.bias import ScoreBias, repaired
from attn_export.attention.lower.cache import Cache
from attn_export.attention.lower.output import place
from attn_export.attention.lower.rewrite import Rewrite, tag
from attn_export.attention.lower.site_inputs import LENGTHS, mask_of
from attn_export.attention.masks import mask_sources
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site
from attn_export.attention.sizes import Size, shape_of

BLOCKS = float(np.finfo(np.float32).min) / 2
"""What is added to scores beyond a length; the ops' own -10,000 does not block large ones."""


def require_plain(site: Site, op: str) -> None:
    """Raise NotLowerable for what no com.microsoft op has."""
    if len(site.node.inputs) > LENGTHS and site.node.inputs[LENGTHS] is not None:
        raise NotLowerable(Reason.MASK, f"its lengths are not given to {op}")
    weights = site.node.outputs[3:]
    if any(value.uses() or value.is_graph_output() for value in weights):
        raise NotLowerable(Reason.WEIGHTS_USED, "its weights are returned")


def require_equal_heads(site: Site, op: str) -> None:
    """Raise NotLowerable for what MultiHeadAttention and Attention lack."""
    if site.kv_heads != site.heads:
        raise NotLowerable(Reason.HEADS, f"{op} has no grouped heads")
    if site.softcap:
        raise NotLowerable(Reason.SOFTCAP, f"{op} has no softcap")


def unidirectional(site: Site, cache: Cache | None) -> bool:
    """Whether the op's own causal mask is all that masks the site.

    It is right where S equals T, or counted from the end of a past. A mask of sizes alone that is
    known to be causal is left to it, also beside lengths; any other mask stays a bias and says
    everything.

    Raises:
        NotLowerable: the site's causal mask is aligned in another way.
    """
    flag, mask = bool(site.node.attributes.get_int("is_causal", 0)), mask_of(site)
    if flag and mask is not None:
        raise NotLowerable(Reason.CAUSAL, "it has a mask beside its causal flag")
    if cache is None:
        aligned = site.query_tokens == site.key_tokens
    else:
        aligned = cache.aligned if flag else site.causal == "lower-right"
    if flag and not aligned:
        raise NotLowerable(Reason.CAUSAL, "its causal mask is not aligned as the op's")
    if flag:
        return True
    if site.mask == "lengths" and site.causal != "none" and not aligned:
        raise NotLowerable(Reason.CAUSAL, "its causal mask is not aligned as the op's")
    alone = site.exact or site.mask == "lengths"
    return alone and site.causal != "none" and site.window is None and aligned


def lengths_of(site: Site, cache: Cache | None) -> ir.Value | None:
    """The number of keys that each row sees, int32 (B,); None where its mask is no lengths.

    Raises:
        NotLowerable: it has a cache, whose new keys lie behind the padding.
    """
    if site.lengths is not None and cache is not None:
        raise NotLowerable(Reason.CACHE, "its lengths count the keys of a cache as well")
    return site.lengths


def fused(
    b: Builder,
    site: Site,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    shape: Sequence[Size],
    attributes: Mapping[str, int | float | list[int]],
    outputs: int = 1,
) -> ir.Node:
    """The op itself; its first output has this shape and the dtype of the first input."""
    node = ir.node(
        op_type, list(inputs), attributes=dict(attributes), domain="com.microsoft",
        num_outputs=outputs,
    )  # fmt: skip
    b.nodes.append(tag(site, node))
    merged = node.outputs[0]
    merged.shape = shape_of(shape)
    merged.type = None if inputs[0] is None else inputs[0].type
    return node


def finish(
    b: Builder,
    site: Site,
    name: str,
    node: ir.Node,
    sources: Sequence[ir.Value],
    bias: ScoreBias | None,
    cache: Cache | None = None,
) -> Rewrite:
    """Blocked rows repaired, heads where the graph wants them, present keys and values handed on.

    Args:
        name: of the lowering.
        node: its first output is (B, S, N * Hv); with a cache two more are the present ones.
        sources: the values of the graph that queries, keys and values are computed from.
    """
    allowed = None if bias is None else bias.allowed
    merged = repaired(b, node.outputs[0], site.heads, allowed)
    old, new = place(b, site.node.outputs[0], merged)
    new.shape, new.type = old.shape, old.type
    also = []
    if cache is not None:
        sources = [*sources, cache.past_key, cache.past_value]
        olds = (cache.present_key, cache.present_value)
        for before, after in zip(olds, node.outputs[1:], strict=True):
            if before is not None:
                after.shape, after.type = before.shape, before.type
                also.append((before, after))
    mask = None if bias is None else bias.given
    if site.lengths is not None:
        mask = mask_of(site)  # it begins where the lengths do
    cut = mask_sources(mask) if mask is not None else []
    begins = [*(v for v in sources if is_computed(v)), *cut]
    return Rewrite(name, unique(begins), old, new, b.nodes, b.weights, mask, also)
