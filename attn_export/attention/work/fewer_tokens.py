"""Layers whose other tokens reach no output are computed for the needed ones alone.

The last block of a classifier that reads its class token: queries, output projection, MLP and
norms of that token are all that is needed, beside the keys and values of all tokens. In general a
Gather or Slice along an axis moves up through every node that computes each row by itself, as long
as nothing else reads the other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attn_export.attention.apply import apply
from attn_export.attention.builder import Builder
from attn_export.attention.data import is_computed, unique
from attn_export.attention.layout import constant
from attn_export.attention.lower.rewrite import Rewrite, initializer
from attn_export.attention.reasons import NotLowerable
from attn_export.attention.site import Work
from attn_export.attention.sizes import shape_of, sizes
from attn_export.attention.work.demand import Demand, Query, Selection, demand
from attn_export.attention.work.rows import Rows

NAME = "fewer-tokens"
PRODUCTS = ("Attention", "Gemm", "MatMul")


def fewer_tokens(
    model: ir.Model, sizes: Sequence[Mapping[str, int]], left: str = ""
) -> tuple[Work, ...]:
    """Rewrite each part of the main graph of which only some rows are needed, once proved.

    Args:
        sizes: as `prove` takes them.
        left: why nothing is to be rewritten; empty where it is.

    Returns:
        What was found, applied or not.
    """
    needed = demand(model.graph)
    done = []
    for group in _groups(needed):
        name = str(group[0].node.name)
        nodes = _behind(needed, group)
        products = [n for n in nodes if n.op_type in PRODUCTS]
        if not products:
            continue
        saves = _saves(products, group)
        if left:
            done.append(Work(NAME, name, False, saves, left))
            continue
        attentions = [n for n in nodes if n.op_type == "Attention"]
        names = [str(n.name) for n in attentions]
        try:
            # Rows are moved, and no number is computed in another way: one magnitude shows it.
            apply(model, _Fewer(needed, name).rewrite(group), sizes, magnitudes=(1.0,))
        except NotLowerable as reason:
            for node, given in zip(attentions, names, strict=True):
                node.name = given
            done.append(Work(NAME, name, False, saves, str(reason)))
        else:
            done.append(Work(NAME, name, True, saves))
    if any(work.applied for work in done):
        RemoveUnusedNodesPass()(model)
    return tuple(done)


def _saves(products: Sequence[ir.Node], group: Sequence[Selection]) -> str:
    kinds = [node.op_type for node in products]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    rows = sorted({index for selection in group for index in selection.rows.indices})
    which = ", ".join(map(str, rows))
    return f"{counts} for row{'s' if len(rows) > 1 else ''} {which} alone"


def _groups(needed: Demand) -> list[list[Selection]]:
    """Selections that share a node are moved up together."""
    groups: list[tuple[list[Selection], set[int]]] = []
    for selection in needed.selections:
        nodes = {id(node) for node in _behind(needed, [selection])}
        merged, apart = [selection], []
        for group, seen in groups:
            if seen & nodes:
                merged, nodes = [*group, *merged], nodes | seen
            else:
                apart.append((group, seen))
        groups = [*apart, (merged, nodes)]
    return [group for group, nodes in groups if nodes]


def _behind(needed: Demand, group: Sequence[Selection]) -> list[ir.Node]:
    """The nodes behind some selections that are computed for rows alone."""
    found: dict[int, ir.Node] = {}
    todo = [selection.node.inputs[0] for selection in group]
    while todo:
        value = todo.pop()
        node = None if value is None or id(value) not in needed.rows else value.producer()
        if node is None or id(node) in found or id(node) not in needed.steps:
            continue
        found[id(node)] = node
        query, steps = needed.queries.get(id(node)), needed.steps[id(node)]
        read = [v for v, rows in zip(node.inputs, steps, strict=True) if rows is not None]
        todo += read if query is None else [query.part.source, *read[1:]]
    return list(found.values())


class _Fewer:
    """Builds the nodes of one group."""

    def __init__(self, needed: Demand, name: str) -> None:
        self._needed = needed
        self._b = Builder(f"{name}/fewer", {})
        self._made: dict[tuple[int, Rows], ir.Value] = {}
        self._given: list[ir.Value] = []  # what the graph has, and the new nodes read

    def rewrite(self, group: Sequence[Selection]) -> Rewrite:
        pairs = [(s.node.outputs[0], self._selected(s)) for s in group]
        for old, new in pairs:
            new.shape, new.type = old.shape, old.type
        begins = unique(v for v in self._given if is_computed(v) and constant(v) is None)
        (old, new), *also = pairs
        nodes, weights = self._b.nodes, self._b.weights
        # No mask is named for the proof: both sides give the same rows of it to the same operator.
        # What becomes of blocked rows is proved where that one is lowered.
        return Rewrite(NAME, begins, old, new, nodes, weights, also=also)

    def _selected(self, selection: Selection) -> ir.Value:
        source = selection.node.inputs[0]
        assert source is not None
        rows = self._rows(source, selection.rows)
        if not selection.drops:
            return self._b.op("Identity", [rows], sizes(rows))
        axes = self._b.constant(np.array([selection.rows.axis], dtype=np.int64))
        return self._b.op("Squeeze", [rows, axes], sizes(selection.node.outputs[0]))

    def _rows(self, value: ir.Value, rows: Rows) -> ir.Value:
        """These rows of a value: computed, or taken of what is."""
        made = self._made.get((id(value), rows))
        if made is not None:
            return made
        node, all_rows = value.producer(), self._needed.rows.get(id(value))
        if node is None or all_rows is None or id(node) not in self._needed.steps:
            self._given.append(value)
            made = self._gather(value, rows)
        elif all_rows == rows:
            made = self._computed(node, rows)
        else:
            places = tuple(all_rows.indices.index(index) for index in rows.indices)
            made = self._gather(self._rows(value, all_rows), replace(rows, indices=places))
        self._made[id(value), rows] = made
        return made

    def _gather(self, value: ir.Value, rows: Rows) -> ir.Value:
        indices = self._b.constant(np.array(rows.indices, dtype=np.int64))
        shape = _cut(value, rows)
        return self._b.op("Gather", [value, indices], shape, axis=rows.axis)

    def _computed(self, node: ir.Node, rows: Rows) -> ir.Value:
        """The node again, for these rows."""
        steps = self._needed.steps[id(node)]
        query = self._needed.queries.get(id(node))
        inputs: list[ir.Value | None] = []
        for index, (value, read) in enumerate(zip(node.inputs, steps, strict=True)):
            if value is None or read is None:
                inputs.append(self._whole(value))
            elif index == 0 and query is not None:
                inputs.append(self._query(query, value, read))
            else:
                inputs.append(self._rows(value, read))
        if node.op_type == "Reshape":
            assert inputs[0] is not None
            return self._reshaped(node, inputs[0], rows)
        attributes: dict[str, Any] = dict(node.attributes)
        attributes.pop("is_causal", None)  # the last query may see every key
        again = ir.Node(
            node.domain, node.op_type, inputs, list(attributes.values()),
            num_outputs=1, version=node.version,
        )  # fmt: skip
        again.metadata_props.update(node.metadata_props)
        # A site keeps its name, by which it was counted.
        again.name = str(node.name)
        if node.op_type == "Attention":
            node.name = f"{node.name}/all"
        else:
            again.name = f"{self._b.prefix}/{node.name}"
        result = again.outputs[0]
        result.shape, result.type = shape_of(_cut(node.outputs[0], rows)), node.outputs[0].type
        self._b.nodes.append(again)
        return result

    def _whole(self, value: ir.Value | None) -> ir.Value | None:
        if value is not None:
            self._given.append(value)
        return value

    def _reshaped(self, node: ir.Node, value: ir.Value, rows: Rows) -> ir.Value:
        return self._b.reshape(value, _cut(node.outputs[0], rows))

    def _query(self, query: Query, value: ir.Value, read: Rows) -> ir.Value:
        """(B, N, rows, H) or (B, rows, N * H) from the rows of what is projected."""
        part, b = query.part, self._b
        source = self._rows(part.source, replace(read, axis=1))
        weight = initializer(f"{b.prefix}/query.weight_{len(b.weights)}", part.weight)
        b.weights.append(weight)
        result = b.op("MatMul", [source, weight], (*sizes(source)[:2], part.weight.shape[1]))
        if part.bias.any():
            bias = initializer(f"{b.prefix}/query.bias_{len(b.weights)}", part.bias)
            b.weights.append(bias)
            result = b.op("Add", [result, bias], sizes(result))
        if len(sizes(value)) == 3:
            return result
        batch, heads, _, size = sizes(value)
        split = b.constant(np.array([0, 0, heads, size], dtype=np.int64))
        apart = b.op("Reshape", [result, split], (batch, len(read.indices), heads, size))
        return b.transpose(apart, (0, 2, 1, 3))


def _cut(value: ir.Value, rows: Rows) -> tuple[Any, ...]:
    """The sizes of a value of which there are only these rows."""
    whole = list(sizes(value))
    whole[rows.axis] = len(rows.indices)
    return tuple(whole)
