"""Grouped heads: keys and values that were repeated for several query heads are not, any more.

Standard Attention lets query head n read key head n // (N / K), as repeat_interleave and enable_gqa
of PyTorch do. Heads that were tiled the other way round, n mod K, stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attn_export.attention.apply import apply
from attn_export.attention.data import unique
from attn_export.attention.layout import REPEAT, Atom, atoms, chain, trace
from attn_export.attention.lower.rewrite import Rewrite, outputs_of
from attn_export.attention.masks import mask_sources
from attn_export.attention.metadata import origin_of
from attn_export.attention.reasons import NotLowerable
from attn_export.attention.sizes import sizes

GROUPED = "/grouped"
"""What the name of a node ends in whose heads were ungrouped."""


def ungroup(model: ir.Model, bindings: Sequence[Mapping[str, int]]) -> None:
    """Give each standard Attention node its keys and values as they were before they were repeated.

    Args:
        bindings: sizes as `prove` takes them.
    """
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Attention" or node.domain not in ("", "ai.onnx"):
            continue
        key, value = node.inputs[1], node.inputs[2]
        if key is None or value is None or any(node.inputs[4:]):
            continue
        found = unrepeated(key), unrepeated(value)
        if found[0] is None or found[1] is None:
            continue
        try:
            apply(model, _rewrite(node, found[0], found[1]), bindings)
        except NotLowerable:  # the repeated form is right as it is
            continue
    RemoveUnusedNodesPass()(model)


def unrepeated(value: ir.Value) -> ir.Value | None:
    """(B, K, T, H) behind a (B, N, T, H) whose head n is its head n // (N / K)."""
    if value.shape is None or len(value.shape) != 4:
        return None
    whole = sizes(value)
    for source in chain(value)[1:]:
        if source.shape is None or len(source.shape) != 4:
            continue
        own = sizes(source)
        groups = _groups(own[1], whole[1])
        view = trace(value, source)
        heads = (*atoms(1, own[1]), Atom(REPEAT, groups, 0))
        expected = (atoms(0, own[0]), heads, atoms(2, own[2]), atoms(3, own[3]))
        if groups > 1 and view.root is source and view.axes == expected and not any(view.offset):
            return source
    return None


def _groups(fewer: object, more: object) -> int:
    if not isinstance(fewer, int) or not isinstance(more, int) or more % fewer:
        return 0
    return more // fewer


def _rewrite(node: ir.Node, key: ir.Value, value: ir.Value) -> Rewrite:
    old = node.outputs[0]
    attributes = {name: a.value for name, a in node.attributes.items() if not a.is_ref()}
    grouped = ir.node(
        "Attention", [node.inputs[0], key, value, *node.inputs[3:]],
        attributes=attributes, version=node.version, num_outputs=len(node.outputs),
        name=f"{node.name}{GROUPED}",
    )  # fmt: skip
    grouped.metadata_props.update(origin_of(node))
    pairs = outputs_of(node, grouped)
    for before, after in pairs:
        after.shape, after.type = before.shape, before.type
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    operands = [v for v in (node.inputs[0], key, value) if v is not None]
    cut = [] if mask is None else mask_sources(mask)
    begins = unique([*operands, *cut])
    new = grouped.outputs[0]
    return Rewrite("ai.onnx.Attention", begins, old, new, [grouped], [], mask, pairs[1:])
