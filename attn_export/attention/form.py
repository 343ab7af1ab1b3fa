"""A site as the question that the capability table answers."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Causal, Site, Size
from attn_export.capability import GROUP_QUERY_ATTENTION, SPARSE_ATTENTION, STANDARD_ATTENTION, Form

PAST_INPUTS = (4, 5)
PRESENT_OUTPUTS = (1, 2)
WEIGHTS_OUTPUT = 3
TO_THE_OP = (GROUP_QUERY_ATTENTION, SPARSE_ATTENTION)  # the structure of a mask is left to them
LEFT_TO_THE_KERNEL = (STANDARD_ATTENTION,)  # the other lowerings repair blocked rows themselves


def form_of(site: Site, op: str, opset: int) -> Form:
    """What `op` would have to compute.

    Raises:
        NotLowerable: the dtype of the query is unknown.
    """
    query = site.node.inputs[0]
    if query is None or query.dtype is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "the dtype of its query is unknown")
    return Form(
        dtype=query.dtype.numpy().name,
        heads=site.heads,
        kv_heads=site.kv_heads,
        head_size=site.head_size,
        v_head_size=site.v_head_size,
        batch=_batch(query),
        query_tokens=site.query_tokens,
        key_tokens=site.key_tokens,
        cross=site.kind == "cross",
        mask=site.mask,
        causal=_causal(site, op),
        blocked_rows=site.mask != "none" and op in LEFT_TO_THE_KERNEL,
        cache=any(_has_input(site.node, index) for index in PAST_INPUTS)
        or any(_is_read(site.node, index) for index in PRESENT_OUTPUTS),
        weights=_is_read(site.node, WEIGHTS_OUTPUT),
        softcap=site.softcap != 0,
        window=site.window is not None and op in TO_THE_OP,
        opset=opset,
    )


def _causal(site: Site, op: str) -> Causal:
    """The causal mask that the op itself must have; a dense mask says it all to most ops."""
    if site.mask == "none" or op in TO_THE_OP:
        return site.causal
    return "upper-left" if site.node.attributes.get_int("is_causal", 0) else "none"


def _batch(query: ir.Value) -> Size:
    size = query.shape[0] if query.shape is not None and len(query.shape) else None
    return size if isinstance(size, int) else str(getattr(size, "value", None) or "batch")


def _has_input(node: ir.Node, index: int) -> bool:
    return len(node.inputs) > index and node.inputs[index] is not None


def _is_read(node: ir.Node, index: int) -> bool:
    if len(node.outputs) <= index:
        return False
    value = node.outputs[index]
    return bool(value.uses()) or value.is_graph_output()
