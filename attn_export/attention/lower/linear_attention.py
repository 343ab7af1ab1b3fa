"""com.microsoft LinearAttention: causal linear attention and its gated and delta forms, one node.

It takes (B, S, N * H), has its state (B, K, H, Hv) as a second output and runs over time once; a
triangle costs S * S and a running sum of k v^T keeps S states. Measured on 2 busy CPU cores with
ONNX Runtime 1.31.1, best of 60 runs: a triangle is as fast at 64 tokens and takes four times as
long at 1,024, a running sum of k v^T takes ten times as long, and chunks are about as fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.contraction import Factor
from attn_export.attention.data import depends_on_input, unique
from attn_export.attention.linear import Recurrence
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.metadata import origin_of
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.sizes import Size, plain, shape_of, sizes

NAME = "com.microsoft.LinearAttention"


def build(found: Recurrence) -> Rewrite:
    """One node for the output, and for the state behind it where something reads that.

    Raises:
        NotLowerable: its heads are not a fixed number, or are grouped otherwise than the op's.
    """
    end = found.output.value.producer()
    metadata = origin_of(end)
    factors = [f for f in (found.query, found.key, found.value, found.decay, found.beta) if f]
    b = Builder(f"{found.output.value.name}/linear", metadata, [factor.value for factor in factors])
    axes = _Axes(found)
    query = axes.flat(b, found.query, axes.heads)
    key = axes.flat(b, found.key, axes.kv_heads)
    value = _ones(b, key, axes) if found.value is None else axes.flat(b, found.value, axes.kv_heads)
    past = None if found.state is None else found.state[0]
    decay, beta = (
        None if gate is None else axes.flat(b, gate, axes.kv_heads)
        for gate in (found.decay, found.beta)
    )
    if decay is not None and not found.decay_is_log:
        decay = b.op("Log", [decay], sizes(decay))
    node = ir.node(
        "LinearAttention",
        [query, key, value, past, decay, beta],
        domain="com.microsoft",
        num_outputs=2,
        name=f"{b.prefix}/LinearAttention",
        attributes={
            "q_num_heads": axes.count(axes.heads),
            "kv_num_heads": axes.count(axes.kv_heads),
            "update_rule": found.rule,
            "scale": found.scale,
        },
    )
    node.metadata_props.update(metadata)
    b.nodes.append(node)
    result, state = node.outputs
    result.type, state.type = found.query.value.type, found.query.value.type
    width = sizes(value)[-1] // axes.count(axes.kv_heads) * axes.count(axes.heads)
    result.shape = shape_of((*axes.rows, width))
    new = axes.unfold(b, result)
    new.shape, new.type = found.output.value.shape, found.output.value.type
    sources = [source for factor in factors for source in _sources(factor.value)]
    bounds = unique([*sources, *([past] if past is not None else [])])
    also = []
    after = None if found.state is None else found.state[1]
    if after is not None and (after.uses() or after.is_graph_output()):
        state.shape, state.type = after.shape, after.type
        also.append((after, state))
    old = found.output.value
    return Rewrite(NAME, bounds, old, new, b.nodes, b.weights, also=also)


class _Axes:
    """Which axes of a recurrence are batch, tokens and heads, and their sizes."""

    def __init__(self, found: Recurrence) -> None:
        self.found = found
        self.size: dict[int, Size] = {**found.output.sizes(), **found.query.sizes()}
        self.size |= found.key.sizes()
        named = [n for n in found.output.labels if n is not None]
        features = [n for n in named if n not in found.query.labels]
        lead = [n for n in named if n not in features and n not in found.tokens]
        self.batch, self.heads = lead[:1], lead[1:]
        self.kv_heads = [n for n in self.heads if n in found.key.labels]
        self.features = features
        fixed = all(isinstance(self.size[label], int) for label in self.heads)
        if not fixed or self.kv_heads != self.heads[: len(self.kv_heads)]:
            raise NotLowerable(Reason.HEADS, "its heads are not a fixed number of groups")

    @property
    def rows(self) -> tuple[Size, Size]:
        """B and S."""
        return self._product(self.batch), self._product(self.found.tokens)

    def count(self, heads: Sequence[int]) -> int:
        return int(self._product(heads))

    def flat(self, b: Builder, factor: Factor, heads: Sequence[int]) -> ir.Value:
        """A factor as (B, S, heads * features)."""
        present = [n for n in factor.labels if n is not None]
        order = [*self.batch, *self.found.tokens, *heads]
        order += [n for n in present if n not in order]
        if set(order) != set(present):
            raise NotLowerable(Reason.HEADS, "an operand is shared by batch rows, tokens or heads")
        ones = [axis for axis, label in enumerate(factor.labels) if label is None]
        perm = [factor.labels.index(label) for label in order]
        moved = b.transpose(factor.value, [*perm, *ones])
        inner = [n for n in order if n not in self.batch and n not in self.found.tokens]
        own = {**self.size, **factor.sizes()}
        width = math.prod(int(own[label]) for label in inner)
        return b.reshape(moved, (*self.rows, width))

    def unfold(self, b: Builder, result: ir.Value) -> ir.Value:
        """(B, S, N * Hv) as the recurrence's output."""
        output = self.found.output
        order = [*self.batch, *self.found.tokens, *self.heads, *self.features]
        split = b.reshape(result, [self.size[label] for label in order])
        labels = [label for label in output.labels if label is not None]
        moved = b.transpose(split, [order.index(label) for label in labels])
        return b.reshape(moved, sizes(output.value))

    def _product(self, labels: Sequence[int]) -> Size:
        return plain(math.prod((self.size[label] for label in labels), start=1))


def _ones(b: Builder, key: ir.Value, axes: _Axes) -> ir.Value:
    """Values of 1, (B, S, K): what they are weighed to is the sum of the weights."""
    one = b.number(1.0, key)
    return b.expand(one, (*axes.rows, axes.count(axes.kv_heads)))


_BOUNDING = {
    "Abs", "Cast", "Clip", "Div", "Exp", "Expand", "Identity", "Log", "Max", "Min", "Neg", "Pow",
    "Reciprocal", "ReduceL2", "ReduceSum", "Reshape", "Sigmoid", "Slice", "Softplus", "Split",
    "Sqrt", "Squeeze", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


def _sources(value: ir.Value) -> list[ir.Value]:
    """Where an operand is cut for its proof: before what keeps it in bounds.

    A decay is the log of a sigmoid and a key has length 1. With any other numbers a state grows
    without bounds, on both sides, and nothing could be compared.
    """
    found: dict[int, ir.Value] = {}
    seen: set[int] = set()
    todo = [value]
    while todo:
        current = todo.pop()
        node = current.producer()
        if id(current) in seen or not depends_on_input(current):
            continue
        seen.add(id(current))
        if node is None or node.op_type not in _BOUNDING:
            found[id(current)] = current
        else:
            todo += [source for source in node.inputs if source is not None]
    return list(found.values())
