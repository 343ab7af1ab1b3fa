"""com.microsoft attention nodes that a file has already: sites that are lowered as they stand."""

from __future__ import annotations

import math

import onnx_ir as ir

from attn_export.attention.data import one_source
from attn_export.attention.site import Causal, Mask, Site, Size

DOMAIN = "com.microsoft"
OPS = {
    "Attention", "DecoderMaskedMultiHeadAttention", "GroupQueryAttention", "MultiHeadAttention",
    "PackedAttention", "PackedMultiHeadAttention", "PagedAttention", "SparseAttention",
}  # fmt: skip
MASKS = {"Attention": 3, "MultiHeadAttention": 4, "DecoderMaskedMultiHeadAttention": 3}
BIASES = {
    "Attention": 5, "MultiHeadAttention": 5, "DecoderMaskedMultiHeadAttention": 4,
    "GroupQueryAttention": 10,
}  # fmt: skip
ALWAYS_CAUSAL = {"GroupQueryAttention", "SparseAttention", "PagedAttention"}


def is_fused(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type in OPS


def fused_site(node: ir.Node, name: str, data: set[int]) -> Site:
    """What such a node says of itself; sizes that its inputs do not show are 0.

    Specification: ONNX Runtime contrib operators.
    """
    heads = node.attributes.get_int("num_heads", 1)
    kv_heads = node.attributes.get_int("kv_num_heads", heads)
    query, key, value = (_input(node, index) for index in range(3))
    packed = node.op_type in ("Attention", "PackedAttention") or key is None
    hidden = node.attributes.get_ints("qkv_hidden_sizes", [])
    width = int(hidden[0]) if hidden else _width(key if packed and key is not None else query)
    if packed and not hidden:  # one matrix or one value holds all three
        width = width * heads // (heads + 2 * kv_heads)
    v_width = int(hidden[2]) if hidden else width * kv_heads // heads if packed else _width(value)
    causal = node.op_type in ALWAYS_CAUSAL or bool(node.attributes.get_int("unidirectional", 0))
    aligned: Causal = "none"
    if causal:
        aligned = "lower-right" if node.op_type in ALWAYS_CAUSAL else "upper-left"
    itself = packed or (query is not None and key is not None and one_source(query, key, data))
    head_size = width // heads
    window = node.attributes.get_int("local_window_size", -1)
    return Site(
        name=name,
        node=node,
        kind="causal" if causal else "self" if itself else "cross",
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        v_head_size=v_width // kv_heads,
        query_tokens=_tokens(query),
        key_tokens=_tokens(query if packed else key),
        mask=_mask(node),
        causal=aligned,
        scale=node.attributes.get_float("scale", 0.0) or 1 / math.sqrt(head_size or 1),
        softcap=node.attributes.get_float("softcap", 0.0),
        window=window if window > 0 else None,
    )


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _width(value: ir.Value | None) -> int:
    """The width of a (B, tokens, D) value or a (D, width) matrix; of (B, N, tokens, H), N * H."""
    if value is None or value.shape is None or not len(value.shape):
        return 0
    sizes = [value.shape[-1], value.shape[1] if len(value.shape) == 4 else 1]
    return math.prod(size if isinstance(size, int) else 0 for size in sizes)


def _tokens(value: ir.Value | None) -> Size:
    if value is None or value.shape is None or len(value.shape) < 3:
        return "?"
    size = value.shape[2 if len(value.shape) == 4 else 1]
    return size if isinstance(size, int) else str(size.value or "?")


def _mask(node: ir.Node) -> Mask:
    if _input(node, BIASES.get(node.op_type, 99)) is not None:
        return "additive"
    mask = _input(node, MASKS.get(node.op_type, 99))
    if mask is None:
        return "none"
    return "lengths" if mask.shape is not None and len(mask.shape) == 1 else "bool"
