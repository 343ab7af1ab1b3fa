"""A site as the question that the capability table answers."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.attention.lower.cache import cache_of
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Causal, Site, Size
from attn_export.capability import STANDARD_ATTENTION, Form

PAST_INPUTS = (4, 5)
PRESENT_OUTPUTS = (1, 2)
WEIGHTS_OUTPUT = 3
LEFT_TO_THE_KERNEL = (STANDARD_ATTENTION,)  # the other lowerings repair blocked rows themselves


def form_of(site: Site, op: str, opset: int, dtype: str | None = None) -> Form:
    """What `op` would have to compute; in the query's dtype unless another is named.

    A mask that says which keys a query may see says it to any op; only GroupQueryAttention, which
    is causal whatever its mask, must know that the site is.

    Raises:
        NotLowerable: the dtype of the query is unknown.
    """
    query = site.node.inputs[0]
    if query is None or query.dtype is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "the dtype of its query is unknown")
    flag = bool(site.node.attributes.get_int("is_causal", 0))
    cache = cache_of(site) if op != STANDARD_ATTENTION else None
    return Form(
        dtype=dtype or query.dtype.numpy().name,
        heads=site.heads,
        kv_heads=site.kv_heads,
        head_size=site.head_size,
        v_head_size=site.v_head_size,
        batch=_batch(query),
        query_tokens=site.query_tokens,
        key_tokens=site.key_tokens if cache is None else _tokens(cache.key),
        cross=site.kind == "cross",
        mask=site.mask,
        causal=_causal(site, flag),
        causal_mask=not flag and site.causal in ("upper-left", "lower-right"),
        blocked_rows=site.mask in ("bool", "additive") and op in LEFT_TO_THE_KERNEL,
        cache=cache is not None
        or any(_has_input(site.node, index) for index in PAST_INPUTS)
        or any(_is_read(site.node, index) for index in PRESENT_OUTPUTS),
        fixed_past=_past_is_fixed(site.node),
        weights=_is_read(site.node, WEIGHTS_OUTPUT),
        softcap=site.softcap != 0,
        window=site.window is not None and site.mask == "none",
        opset=opset,
    )


def _causal(site: Site, flag: bool) -> Causal:
    """What the op does itself: what a flag says, or what lengths leave of a mask."""
    if flag:
        return "upper-left"
    return site.causal if site.mask == "lengths" else "none"


def _batch(query: ir.Value) -> Size:
    size = query.shape[0] if query.shape is not None and len(query.shape) else None
    return size if isinstance(size, int) else str(getattr(size, "value", None) or "batch")


def _past_is_fixed(node: ir.Node) -> bool:
    past = node.inputs[PAST_INPUTS[0]] if _has_input(node, PAST_INPUTS[0]) else None
    return past is not None and past.shape is not None and isinstance(past.shape[2], int)


def _tokens(value: ir.Value) -> Size:
    size = value.shape[-2] if value.shape is not None else None
    return size if isinstance(size, int) else str(getattr(size, "value", None) or "tokens")


def _has_input(node: ir.Node, index: int) -> bool:
    return len(node.inputs) > index and node.inputs[index] is not None


def _is_read(node: ir.Node, index: int) -> bool:
    if len(node.outputs) <= index:
        return False
    value = node.outputs[index]
    return bool(value.uses()) or value.is_graph_output()
