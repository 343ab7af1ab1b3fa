"""Whether the fused ops of a graph are still whole after another precision was made of it."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

FUSED = {
    ("", "Attention"),
    ("com.microsoft", "Attention"),
    ("com.microsoft", "MultiHeadAttention"),
    ("com.microsoft", "GroupQueryAttention"),
    ("com.microsoft", "LinearAttention"),
}
BETWEEN = ("Cast", "QuantizeLinear", "DequantizeLinear")


def fused_ops(model: ir.Model) -> Counter[str]:
    """How many of each fused attention op the graph has, bodies included."""
    return Counter(
        f"{node.domain or 'ai.onnx'}.{node.op_type}"
        for node in model.graph.all_nodes()
        if _is(node)
    )


def wrapped(model: ir.Model) -> list[str]:
    """Fused ops whose operands go through a Cast or a quantisation, or their result a Cast."""
    found = []
    for node in filter(_is, model.graph.all_nodes()):
        makers = [v.producer() for v in node.inputs[:3] if v is not None]
        readers = [user for user, _ in node.outputs[0].uses()]
        kinds = {n.op_type for n in makers if n is not None and n.op_type in BETWEEN}
        if readers and all(reader.op_type == "Cast" for reader in readers):
            kinds.add("Cast")
        if kinds:
            found.append(f"{node.name} stands between {' and '.join(sorted(kinds))} nodes")
    return found


def _is(node: ir.Node) -> bool:
    return (node.domain.removeprefix("ai.onnx"), node.op_type) in FUSED
