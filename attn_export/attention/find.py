"""Find attention sites in a graph, by what they compute."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir

from attn_export.attention.data import activations, one_source
from attn_export.attention.fused import fused_site, is_fused
from attn_export.attention.metadata import MODULE
from attn_export.attention.padding import row_lengths
from attn_export.attention.site import Site, Size, mask_kind
from attn_export.attention.structure import Structure, structure
from attn_export.attention.written.describe import describe
from attn_export.attention.written.softmaxes import softmax


def find(model: ir.Model, refused: Collection[str] = ()) -> list[Site]:
    """The sites in the order of the graph: each Attention node is one.

    The lengths of rows that are declared right padded are computed at the front of the graph.

    Args:
        refused: names of the nodes that end a softmax which could not be made one.
    """
    nodes = [
        node
        for node in model.graph.all_nodes()
        if is_attention(node) or is_fused(node) or node.name in refused
    ]
    names, data = _names(nodes), activations(model.graph)
    sites = []
    for node, name in zip(nodes, names, strict=True):
        try:
            sites.append(_site(node, name, data))
        except ValueError:  # its heads are not known: counted, and listed as not recognised
            continue
    known: dict[tuple[object, ...], Structure] = {}  # layers share their masks
    return [_with_structure(model, site, known) for site in sites]


def is_attention(node: ir.Node) -> bool:
    return node.op_type == "Attention" and node.domain in ("", "ai.onnx")


def _names(nodes: list[ir.Node]) -> list[str]:
    """The PyTorch submodule of each node where it is known; a number behind it where it repeats."""
    wanted = [node.metadata_props.get(MODULE) or node.name or "attention" for node in nodes]
    used: dict[str, int] = {}
    names = []
    for name in wanted:
        used[name] = used.get(name, 0) + 1
        names.append(name if wanted.count(name) == 1 else f"{name}.{used[name] - 1}")
    return names


def _site(node: ir.Node, name: str, data: set[int]) -> Site:
    written = softmax(node)
    if written is not None:
        return describe(written, name, data)
    if is_fused(node):
        return fused_site(node, name, data)
    query, key, value = node.inputs[:3]
    if query is None or key is None or value is None:
        raise ValueError(f"Attention node '{name}' lacks an input")
    heads = node.attributes.get_int("q_num_heads", 0) or _size(query, 1)
    kv_heads = node.attributes.get_int("kv_num_heads", 0) or _size(key, 1)
    tokens = 2 if _rank(query) == 4 else 1
    packed = _rank(query) == 3
    head_size = _known(query, -1) // (heads if packed else 1)
    scale = node.attributes.get_float("scale", 0.0)
    if not head_size and not scale:
        raise ValueError(f"the scale of '{name}' is unknown")
    causal = node.attributes.get_int("is_causal", 0)
    return Site(
        name=name,
        node=node,
        kind="causal" if causal else "self" if one_source(query, key, data) else "cross",
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        v_head_size=_known(value, -1) // (kv_heads if packed else 1),
        query_tokens=_tokens(query, tokens),
        key_tokens=_tokens(key, tokens),
        mask=mask_kind(node),
        causal="upper-left" if causal else "none",
        scale=scale or 1 / math.sqrt(head_size),
        softcap=node.attributes.get_float("softcap", 0.0),
    )


def _with_structure(
    model: ir.Model, site: Site, known: dict[tuple[object, ...], Structure]
) -> Site:
    mask = site.node.inputs[3] if is_attention(site.node) and len(site.node.inputs) > 3 else None
    if mask is None or site.causal == "upper-left":
        return site
    key = (id(mask), site.tokens)
    if key not in known:
        known[key] = structure(model, mask, site.tokens)
    found = known[key]
    kind = site.kind
    if found.causal in ("upper-left", "lower-right"):
        kind = "causal" if found.window is None else "window"
    elif found.bias:
        kind = "relative-bias"
    site = replace(site, kind=kind, causal=found.causal, window=found.window, exact=found.exact)
    if found.padding is None or site.node.graph is not model.graph:
        return site
    return replace(site, mask="lengths", lengths=row_lengths(model, found.padding))


def _rank(value: ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)


def _known(value: ir.Value, axis: int) -> int:
    """A size; 0 where it is symbolic, as the head size is of attention between channels."""
    size = value.shape[axis] if value.shape is not None else None
    return size if isinstance(size, int) else 0


def _size(value: ir.Value, axis: int) -> int:
    size = value.shape[axis] if value.shape is not None else None
    if not isinstance(size, int):
        raise ValueError(f"the size of axis {axis} of '{value.name}' is unknown")
    return size


def _tokens(value: ir.Value, axis: int) -> Size:
    size = value.shape[axis] if value.shape is not None else None
    return size if isinstance(size, int) else str(getattr(size, "value", None) or "?")
