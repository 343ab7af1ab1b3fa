"""Did attention go to the provider that was asked for? By what ONNX Runtime recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from attn_export.runtimes.base import Placed

FUSED = {
    ("com.microsoft", "Attention"),
    ("com.microsoft", "MultiHeadAttention"),
    ("com.microsoft", "GroupQueryAttention"),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"),
    ("com.microsoft", "PackedAttention"),
    ("com.microsoft", "PackedMultiHeadAttention"),
    ("com.microsoft", "PagedAttention"),
    ("com.microsoft", "SparseAttention"),
    ("com.microsoft", "LinearAttention"),
    ("", "Attention"),
    ("", "LinearAttention"),
}
PLAIN = {("", "Softmax")}
"""What is left of attention where it is written out."""


def is_attention(node: Placed) -> bool:
    domain = "" if node.domain == "ai.onnx" else node.domain
    return (domain, node.op) in FUSED | PLAIN


def misplaced(nodes: Iterable[Placed], provider: str) -> list[Placed]:
    """Nodes of attention that another provider runs."""
    return [node for node in nodes if node.provider != provider and is_attention(node)]


def counts(nodes: Iterable[Placed]) -> dict[str, int]:
    """Provider -> how many nodes it runs."""
    return dict(Counter(node.provider for node in nodes))


def told(nodes: Sequence[Placed], provider: str) -> str:
    """One clause on nodes that went elsewhere."""
    first = nodes[0]
    more = f" and {len(nodes) - 1} more nodes of attention" if len(nodes) > 1 else ""
    return f"{first.provider} runs {first.op} '{first.name}'{more}, not {provider}"
