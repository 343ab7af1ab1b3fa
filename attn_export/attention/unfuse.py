"""com.microsoft attention nodes back in canonical form, so that a graph can be lowered anew."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attn_export.attention.apply import drop_unused_initializers, register
from attn_export.attention.builder import Builder
from attn_export.attention.fused import is_fused
from attn_export.attention.layout import constant
from attn_export.attention.lower.contrib_attention import NAME as CONTRIB_ATTENTION
from attn_export.attention.lower.multi_head_attention import NAME as MULTI_HEAD_ATTENTION
from attn_export.attention.metadata import SITE, origin_of
from attn_export.attention.reasons import NotLowerable
from attn_export.attention.sizes import Size, shape_of, sizes

PROJECTED, MASKED = 3, 5  # numbers of inputs: all that com.microsoft Attention has, and its bias
PAST_KEY, PAST_VALUE = 6, 7
Parts = tuple[ir.Value, ir.Value, ir.Value]


def unfuse(model: ir.Model, *, packed: bool = False) -> list[str]:
    """Make each com.microsoft Attention and MultiHeadAttention a standard one, in place.

    Its projections become a product each, or one product and a Split where `packed`. Nothing is
    proved here: what is made of the graph has to be compared with what it was made from.

    Returns:
        names of the attention nodes that stay as they are, since standard Attention has no such
        inputs (a packed value, lengths, a buffer that is shared).
    """
    kept = []
    for node in [n for n in model.graph.all_nodes() if is_fused(n)]:
        write = WRITERS.get(f"{node.domain}.{node.op_type}")
        try:
            if write is None:
                raise ValueError(f"{node.op_type} is left as it is")
            builder, new = write(node, packed)
        except (ValueError, NotLowerable):  # a rank or constant that is not known
            kept.append(str(node.name))
            continue
        _replace(node, builder, new)
    RemoveUnusedNodesPass()(model)
    drop_unused_initializers(model)
    return kept


def _replace(node: ir.Node, builder: Builder, new: list[ir.Value]) -> None:
    graph = node.graph
    if not isinstance(graph, ir.Graph):
        raise ValueError(f"'{node.name}' lies in no graph")
    for weight in builder.weights:
        register(graph, weight)
    graph.insert_before(node, builder.nodes)
    for old, made in zip(node.outputs, new, strict=False):
        made.shape, made.type = old.shape, old.type
        ir.convenience.replace_all_uses_with(old, made, replace_graph_outputs=True)
        old.name, made.name = f"{old.name}_fused", old.name
    graph.remove(node, safe=True)


def _projected(node: ir.Node, packed: bool) -> tuple[Builder, list[ir.Value]]:
    """com.microsoft Attention: (B, S, D) times (D, 2 * N * H + N * Hv), bias on the scores."""
    x, weight, offset = _given(node, 0), _array(node, 1), _array(node, 2)
    _refuse(node, [3, 4, *range(MASKED + 1, len(node.inputs))])
    heads = node.attributes.get_int("num_heads", 0)
    even = [weight.shape[1] // 3] * 3
    widths = [int(width) for width in node.attributes.get_ints("qkv_hidden_sizes", even)]
    batch, tokens, _ = sizes(x)
    b = _builder(node)
    if packed:
        whole = b.op("MatMul", [x, b.constant(weight)], (batch, tokens, sum(widths)))
        whole = b.op("Add", [whole, b.constant(offset)], (batch, tokens, sum(widths)))
        parts = _split(b, whole, widths)
    else:
        ends = np.cumsum(widths)[:-1]
        columns = zip(np.split(weight, ends, axis=1), np.split(offset, ends), strict=True)
        query, key, value = (
            b.op("Add", [b.op("MatMul", [x, b.constant(w)], (batch, tokens, w.shape[1])),
                         b.constant(o)], (batch, tokens, w.shape[1]))
            for w, o in columns
        )  # fmt: skip
        parts = (query, key, value)
    bias = _optional(node, MASKED)
    return b, _standard(b, node, [*parts, bias], heads)


def _split(b: Builder, whole: ir.Value, widths: list[int]) -> Parts:
    """Three outputs of one node."""
    lead = sizes(whole)[:2]
    lengths = b.constant(np.array(widths, np.int64))
    node = ir.node("Split", [whole, lengths], attributes={"axis": 2}, num_outputs=3)
    node.name = f"{b.prefix}/Split"
    node.metadata_props.update(b.metadata)
    b.nodes.append(node)
    for output, width in zip(node.outputs, widths, strict=True):
        output.shape, output.type = shape_of((*lead, width)), whole.type
    query, key, value = node.outputs
    return query, key, value


def _apart(node: ir.Node, packed: bool) -> tuple[Builder, list[ir.Value]]:
    """MultiHeadAttention: (B, S, N * H), keys and values alike or (B, N, T, H), with a cache."""
    query, key, value = (_given(node, index) for index in range(3))
    _refuse(node, [3, 4, *range(PAST_VALUE + 1, len(node.inputs))])
    heads = node.attributes.get_int("num_heads", 0)
    b = _builder(node)
    apart = len(sizes(key)) == 4
    batch, tokens, width = sizes(query)
    if apart:
        query = _heads_first(b, query, heads, width)
    inputs = [query, key, value, *(_optional(node, index) for index in (5, PAST_KEY, PAST_VALUE))]
    new = _standard(b, node, inputs, 0 if apart else heads)
    if apart:
        new[0].shape = shape_of((batch, heads, tokens, sizes(value)[3]))
        turned = b.transpose(new[0], (0, 2, 1, 3))
        new[0] = b.reshape(turned, (batch, tokens, heads * _whole(sizes(value)[3])))
    return b, new


def _heads_first(b: Builder, query: ir.Value, heads: int, width: Size) -> ir.Value:
    batch, tokens, _ = sizes(query)
    apart = b.reshape(query, (batch, tokens, heads, _whole(width) // heads))
    return b.transpose(apart, (0, 2, 1, 3))


def _standard(
    b: Builder, node: ir.Node, inputs: list[ir.Value | None], heads: int
) -> list[ir.Value]:
    """Standard Attention; with heads where its inputs are (B, tokens, N * H)."""
    while inputs[-1] is None:
        inputs.pop()
    causal = node.attributes.get_int("unidirectional", 0)
    attributes: dict[str, int | float] = {"is_causal": causal} if causal else {}
    if scale := node.attributes.get_float("scale", 0.0):
        attributes["scale"] = scale
    if heads:
        attributes |= {"q_num_heads": heads, "kv_num_heads": heads}
    count = len(node.outputs)
    made = ir.node("Attention", inputs, attributes=attributes, num_outputs=count)
    made.name = f"{b.prefix}/attention"
    made.metadata_props.update(b.metadata)
    made.outputs[0].type = node.outputs[0].type
    b.nodes.append(made)
    return list(made.outputs)


def _builder(node: ir.Node) -> Builder:
    prefix = node.metadata_props.get(SITE) or str(node.name)
    return Builder(f"{prefix}/unfused", origin_of(node), [v for v in node.inputs[:1] if v])


def _given(node: ir.Node, index: int) -> ir.Value:
    value = _optional(node, index)
    if value is None or len(sizes(value)) not in (3, 4):
        raise ValueError(f"input {index} of '{node.name}' is not apart")
    return value


def _optional(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _refuse(node: ir.Node, indices: list[int]) -> None:
    for index in indices:
        if _optional(node, index) is not None:
            raise ValueError(f"input {index} of '{node.name}' has no counterpart")


def _array(node: ir.Node, index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    value = _optional(node, index)
    array = None if value is None else constant(value)
    if array is None:
        raise ValueError(f"input {index} of '{node.name}' is not constant")
    return array


def _whole(size: Size) -> int:
    if not isinstance(size, int):
        raise ValueError(f"the size '{size}' is not fixed")
    return size


WRITERS: dict[str, Callable[[ir.Node, bool], tuple[Builder, list[ir.Value]]]] = {
    CONTRIB_ATTENTION: _projected,
    MULTI_HEAD_ATTENTION: _apart,
}
