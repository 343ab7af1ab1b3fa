"""What the nodes around packed layers need of a value that is put back into rows."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.attention.work.rows import ELEMENTWISE
from attn_export.attention.work.token_wise import LAYOUT

ATTENTION = ("Attention", "MultiHeadAttention")
TURNS = ("RotaryEmbedding",)


def reads_size(node: ir.Node) -> bool:
    """A Shape of batch or tokens, which the mask has as well."""
    end = node.attributes.get_int("end", 99)
    return node.op_type == "Shape" and 0 <= node.attributes.get_int("start", 0) < end <= 2


def is_attended(node: ir.Node, index: int) -> bool:
    """Whether a value is nothing but queries, keys or values, so that masked tokens may be any.

    The proof of the whole graph has the last word.
    """
    uses = [(node, index)]
    seen: set[ir.Node] = set()
    while uses:
        user, position = uses.pop()
        if user.op_type in ATTENTION and position < 3:
            continue
        if user.op_type not in (*LAYOUT, *ELEMENTWISE, *TURNS):
            return False
        if any(value.is_graph_output() for value in user.outputs):
            return False
        if user not in seen:
            seen.add(user)
            uses += [use for value in user.outputs for use in value.uses()]
    return True
