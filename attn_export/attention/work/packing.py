"""Token-wise layers of a padded batch, computed for the tokens that count alone.

Effective Transformer (ByteDance, 2020) and ONNX Runtime's PackedAttention do the same on CUDA: the
tokens of all rows stand behind each other, and are put back where rows matter, as in attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.layout import constant
from attn_export.attention.sizes import shape_of, size_of, sizes
from attn_export.attention.work.readers import is_attended, reads_size
from attn_export.attention.work.token_wise import PRODUCT, Padded, Places, token_wise

INT64 = ir.DataType.INT64


def pack(model: ir.Model, padded: Padded) -> str:
    """Rewrite the main graph in place; what it saves, in words, empty where there is nothing."""
    graph = model.graph
    region = token_wise(graph, padded)
    if not region:
        return ""
    packed = _Packing(graph, padded, region)
    for node, where in region.items():
        packed.compute(node, where)
    packed.insert_front()
    kinds = [node.op_type for node in region if node.op_type in (PRODUCT, "Gather")]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(sorted(kinds)[::-1]))
    return f"{counts} for the tokens that count alone"


class _Packing:
    """Builds packed nodes beside those of a graph, and lets what is around them read the result."""

    def __init__(
        self, graph: ir.Graph, padded: Padded, region: Mapping[ir.Node, Sequence[Places]]
    ) -> None:
        self._graph = graph
        self._padded = padded
        self._region = region
        self._prefix = f"{padded.mask.name}/packed"
        self._front = Builder(f"{self._prefix}/places", {})
        self._made: dict[tuple[int, Places], ir.Value] = {}
        self._total = size_of(f"{_word(str(padded.mask.name))}_kept")
        self._count = 0

    @cached_property
    def _kept(self) -> ir.Value:
        """bool (B, S)"""
        b, mask = self._front, self._padded.mask
        shape, boolean = self._padded.sizes, ir.DataType.BOOL
        kept = mask if mask.dtype == boolean else b.op("Cast", [mask], shape, boolean,
                                                        to=int(boolean))  # fmt: skip
        return kept if self._padded.keeps else b.op("Not", [kept], shape)

    @cached_property
    def _places(self) -> ir.Value:
        """int64 (2, tokens): row and position of each token that counts."""
        return self._front.op("NonZero", [self._kept], (2, self._total), INT64)

    @cached_property
    def _coordinates(self) -> ir.Value:
        """int64 (1, tokens, 2)"""
        b = self._front
        pairs = b.op("Transpose", [self._places], (self._total, 2), perm=[1, 0])
        return b.op("Unsqueeze", [pairs, self._ints(0)], (1, self._total, 2))

    def _ints(self, *numbers: int, builder: Builder | None = None) -> ir.Value:
        return (builder or self._front).constant(np.array(numbers, np.int64))

    def _part(self, index: int) -> ir.Value:
        """int64 (tokens,): the rows, or the positions."""
        which = self._front.constant(np.array(index, np.int64))
        return self._front.op("Gather", [self._places, which], (self._total,), axis=0)

    @cached_property
    def _rows(self) -> ir.Value:
        return self._part(0)

    @cached_property
    def _positions(self) -> ir.Value:
        return self._part(1)

    @cached_property
    def _back(self) -> ir.Value:
        """int64 (B, S): where each token is among the packed ones; padding names one before it."""
        b, (batch, tokens) = self._front, self._padded.sizes
        numbers = b.op("Cast", [self._kept], (batch, tokens), INT64, to=int(INT64))
        flat = b.op("Reshape", [numbers, self._ints(-1)], (batch * tokens,))
        counted = b.op("CumSum", [flat, b.constant(np.array(0, np.int64))], (batch * tokens,))
        places = b.op("Sub", [counted, self._ints(1)], (batch * tokens,))
        shape = b.op("Shape", [self._padded.mask], (2,), INT64)
        return b.op("Reshape", [places, shape], (batch, tokens))

    def compute(self, node: ir.Node, where: Sequence[Places]) -> None:
        """The node again, packed; and its results put back for all that is not."""
        b = self._builder()
        inputs = [
            None if value is None else self._operand(b, value, axes)
            for value, axes in zip(node.inputs, where, strict=True)
        ]
        if node.op_type == "Reshape":
            rest = [int(size) for size in sizes(node.outputs[0])[2:]]
            inputs[1] = self._ints(1, -1, *rest, builder=b)
        again = ir.Node(
            node.domain, node.op_type, inputs,
            [a for a in node.attributes.values() if node.op_type != "Reshape"],
            num_outputs=len(node.outputs), version=node.version,
        )  # fmt: skip
        again.metadata_props.update(node.metadata_props)
        again.name = f"{node.name}/packed"
        b.nodes.append(again)
        for old, new in zip(node.outputs, again.outputs, strict=True):
            if not old.name:
                new.name = ""
                continue
            new.name, new.type = f"{old.name}/packed", old.type
            if old.shape is not None:
                new.shape = shape_of((1, self._total, *sizes(old)[2:]))
            self._made[id(old), (0, 1)] = new
        for old in node.outputs:
            self._put_back(b, old)
        self._insert(b, node)

    def _builder(self) -> Builder:
        self._count += 1
        return Builder(f"{self._prefix}_{self._count}", {})

    def _insert(self, b: Builder, anchor: ir.Node) -> None:
        for weight in b.weights:
            self._graph.register_initializer(weight)
        self._graph.insert_after(anchor, b.nodes)

    def insert_front(self) -> None:
        """Put in front what says where the tokens are."""
        for weight in self._front.weights:
            self._graph.register_initializer(weight)
        self._graph.insert_before(self._graph[0], self._front.nodes)

    def _operand(self, b: Builder, value: ir.Value, axes: Places) -> ir.Value:
        if axes == (None, None):
            return value
        made = self._made.get((id(value), axes))
        if made is None:
            made = self._made[id(value), axes] = self._gathered(b, value, axes)
        return made

    def _gathered(self, b: Builder, value: ir.Value, axes: Places) -> ir.Value:
        """What each token reads of a value that is not packed."""
        batch, tokens = axes
        whole = sizes(value)
        if tokens is None:  # (B, 1, ...)
            rows = b.op("Gather", [value, self._rows], (self._total, *whole[1:]), axis=0)
            apart = b.op(
                "Unsqueeze", [rows, self._ints(0, builder=b)], (1, self._total, *whole[1:])
            )
            behind = self._ints(2, builder=b)
            return b.op("Squeeze", [apart, behind], (1, self._total, *whole[2:]))
        if batch is None:  # (S, ...) or (1, S, ...)
            shape = (*whole[:tokens], self._total, *whole[tokens + 1 :])
            return b.op("Gather", [value, self._positions], shape, axis=tokens)
        shape = (1, self._total, *whole[2:])
        return b.op("GatherND", [value, self._coordinates], shape)

    def _put_back(self, b: Builder, old: ir.Value) -> None:
        """Let everything outside of the region read (B, S, ...) again."""
        outside = [(node, index) for node, index in old.uses() if node not in self._region]
        for node, index in [use for use in outside if reads_size(use[0])]:
            node.replace_input_with(index, self._padded.mask)
            outside.remove((node, index))
        for node, index in list(outside):
            if self._picked(b, old, node, index):
                outside.remove((node, index))
        is_output = old.is_graph_output()
        if not outside and not is_output:
            return
        back = self._unpacked(b, old)
        if is_output or not all(is_attended(node, index) for node, index in outside):
            back = self._zeroed(b, back)
        for node, index in outside:
            node.replace_input_with(index, back)
        if is_output:
            back.name, old.name = old.name, f"{old.name}/whole"
            for index, value in enumerate(self._graph.outputs):
                if value is old:
                    self._graph.outputs[index] = back

    def _flat(self, b: Builder, old: ir.Value) -> ir.Value:
        packed = self._made[id(old), (0, 1)]
        return b.op("Squeeze", [packed, self._ints(0, builder=b)], sizes(packed)[1:])

    def _unpacked(self, b: Builder, old: ir.Value) -> ir.Value:
        return b.op("Gather", [self._flat(b, old), self._back], sizes(old), axis=0)

    def _zeroed(self, b: Builder, back: ir.Value) -> ir.Value:
        assert back.dtype is not None
        kept = b.op("Unsqueeze",
                    [self._kept, self._ints(*range(2, len(sizes(back))), builder=b)],
                    (*self._padded.sizes, *(1,) * (len(sizes(back)) - 2)))  # fmt: skip
        zero = b.constant(np.zeros((), back.dtype.numpy()))
        return b.op("Where", [kept, back, zero], sizes(back), back.dtype)

    def _picked(self, b: Builder, old: ir.Value, node: ir.Node, index: int) -> bool:
        """A Gather of a few constant positions, as of a class token, is taken from packed ones."""
        which = constant(node.inputs[1]) if node.op_type == "Gather" and index == 0 else None
        if which is None or node.attributes.get_int("axis", 0) != 1 or which.ndim > 1:
            return False
        result = node.outputs[0]
        shape = sizes(result)[: 1 + which.ndim]
        places = b.op("Gather", [self._back, b.constant(which)], shape, axis=1)
        picked = b.op("Gather", [self._flat(b, old), places], sizes(result), axis=0)
        for user, position in list(result.uses()):
            user.replace_input_with(position, picked)
        if result.is_graph_output():
            picked.name, result.name = result.name, f"{result.name}/whole"
            for place, value in enumerate(self._graph.outputs):
                if value is result:
                    self._graph.outputs[place] = picked
        return True


def _word(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
