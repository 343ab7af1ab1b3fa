"""Nodes that compute each token of a padded batch by itself, on values (B, S, ...).

Such a value may be packed: the tokens that count, one behind the other, as (1, tokens, ...). A node
is token-wise where the same node makes a packed result from packed operands. Operands that are
broadcast along the batch or along the tokens are gathered for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from attn_export.attention.data import LENDERS, subgraphs, walk
from attn_export.attention.layout import constant
from attn_export.attention.sizes import Size, sizes
from attn_export.attention.work.rows import DOMAINS, ELEMENTWISE, Rows, reads

PRODUCT = "MatMul"
LAYOUT = frozenset({
    "Cast", "Concat", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
SKIP_NORMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")

Places = tuple[int | None, int | None]
"""The axes of an operand that are the batch's and the tokens'; None where it has none."""


@dataclass(frozen=True)
class Padded:
    """The mask (B, S) that says which tokens count, its sizes, and the number that keeps one."""

    mask: ir.Value
    keeps: int

    @property
    def sizes(self) -> tuple[Size, ...]:
        return sizes(self.mask)

    def has(self, value: ir.Value | None, rank: int = 3) -> bool:
        """Whether a value is (B, S, ...), of `rank` axes or more."""
        if value is None or value.shape is None or len(value.shape) < rank:
            return False
        return sizes(value)[:2] == self.sizes


def places(node: ir.Node, padded: Padded) -> list[Places] | None:
    """Where each input of a node has batch and tokens; None where it is not token-wise."""
    outputs = [value for value in node.outputs if value.uses() or value.is_graph_output()]
    if node.domain not in DOMAINS or not outputs or not all(map(padded.has, outputs)):
        return None
    if node.op_type in _RULES:
        return _RULES[node.op_type](node, padded)
    if outputs != [node.outputs[0]]:
        return None
    if node.op_type == "Reshape" and not _is_plain(node):
        return None
    steps = [reads(node, Rows(axis, (0,))) for axis in (0, 1)]
    if steps[0] is None or steps[1] is None:
        return None
    found = [
        tuple(None if rows is None else rows.axis for rows in pair)
        for pair in zip(*steps, strict=True)
    ]
    whole = (None, None)
    usual = [(0, 1), whole] if node.op_type in _MOVES else [(0, 1), (0, None), (None, 1), (None, 0),
                                                          whole]  # fmt: skip
    return [(a, b) for a, b in found] if all(pair in usual for pair in found) else None


_MOVES = LAYOUT - {"Cast", "Identity"}


def _is_plain(node: ir.Node) -> bool:
    """A Reshape whose sizes behind the tokens are fixed."""
    return all(isinstance(size, int) for size in sizes(node.outputs[0])[2:])


def _embedded(node: ir.Node, padded: Padded) -> list[Places] | None:
    """Rows of a table, one for each token."""
    table, ids = node.inputs
    own = table is not None and ids is not None and table.shape is not None
    fits = own and padded.has(ids, 2) and node.attributes.get_int("axis", 0) == 0
    return [(None, None), (0, 1)] if fits else None


def _divided(node: ir.Node, padded: Padded) -> list[Places] | None:
    source = node.inputs[0]
    if source is None or not padded.has(source):
        return None
    axis = node.attributes.get_int("axis", 0) % len(sizes(source))
    return [(0, 1), *[(None, None)] * (len(node.inputs) - 1)] if axis > 1 else None


def _sliced(node: ir.Node, padded: Padded) -> list[Places] | None:
    source = node.inputs[0]
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
    if source is None or axes is None or not padded.has(source):
        return None
    behind = all(int(axis) % len(sizes(source)) > 1 for axis in axes.reshape(-1))
    return [(0, 1), *[(None, None)] * (len(node.inputs) - 1)] if behind else None


def _skip_norm(node: ir.Node, padded: Padded) -> list[Places] | None:
    """(x, skip, scale, ...): the sum of the first two is normed, and may be returned as well."""
    if not all(map(padded.has, node.inputs[:2])):
        return None
    return [(0, 1), (0, 1), *[(None, None)] * (len(node.inputs) - 2)]


_RULES = {
    "Gather": _embedded, "Split": _divided, "Slice": _sliced,
    **dict.fromkeys(SKIP_NORMS, _skip_norm),
}  # fmt: skip


def token_wise(graph: ir.Graph, padded: Padded) -> dict[ir.Node, list[Places]]:
    """The nodes to compute for packed tokens, in the graph's order, with their operands' axes.

    They hang together with a product. What is made from the mask alone stays as it is. So does
    layout at the border, where attention's lowering wants to see it, and what ends the region but
    is made of values that are put back anyway.
    """
    data = _data(graph, padded.mask)
    found = {
        node: where
        for node in graph
        if any(id(value) in data for value in node.outputs)
        and (where := places(node, padded)) is not None
    }
    while outer := [
        n for n in found if (_is_layout(n) and _is_outer(n, found)) or _is_spare(n, found)
    ]:
        for node in outer:
            del found[node]
    products = [node for node in found if node.op_type == PRODUCT]

    def near(value: ir.Value) -> Iterator[ir.Value | None]:
        for node in (value.producer(), *(node for node, _ in value.uses())):
            if node in found:
                yield from node.outputs
                yield from (v for v in node.inputs if v is not None and v.producer() in found)

    joined = {v.producer() for v in walk([node.outputs[0] for node in products], near)}
    return {node: where for node, where in found.items() if node in joined}


def _data(graph: ir.Graph, mask: ir.Value) -> set[int]:
    """Identities of the values that depend on the numbers of another input than the mask."""
    found = {id(value) for value in graph.inputs if value is not mask}
    for node in graph:
        read = any(id(value) in found for value in node.inputs)
        if subgraphs(node) or (read and node.op_type not in LENDERS):
            found |= {id(value) for value in node.outputs}
    return found


def _is_layout(node: ir.Node) -> bool:
    return node.op_type in LAYOUT or len(sizes(node.outputs[0])) > 3


def _is_spare(node: ir.Node, found: Collection[ir.Node | None]) -> bool:
    """Whether a last elementwise node reads what something outside of the region reads too."""
    if node.op_type not in ELEMENTWISE or any(_users(value, found) for value in node.outputs):
        return False
    read = [value for value in node.inputs if value is not None and value.producer() in found]
    return any(v.is_graph_output() or len(_users(v, found)) < len(v.uses()) for v in read)


def _users(value: ir.Value, found: Collection[ir.Node | None]) -> list[ir.Node]:
    return [user for user, _ in value.uses() if user in found]


def _is_outer(node: ir.Node, found: Collection[ir.Node | None]) -> bool:
    """Whether nothing of the region is before it, or nothing behind it."""
    before = any(value is not None and value.producer() in found for value in node.inputs)
    behind = any(_users(value, found) for value in node.outputs)
    return not (before and behind)
