"""Find rotary position embedding (RoFormer, Su et al., 2021) by what it computes.

Pairs of a head's elements are turned by an angle that depends on the position:

    y[i] = x[i] * cos - x[j] * sin        y[j] = x[j] * cos + x[i] * sin

with j = i + R/2 (halves, as Llama and GPT-NeoX) or j = i + 1 (interleaved, as GPT-J and complex
numbers). Elements from R on pass through. Whether the factors really are cosines does not matter.

1. Each element along the last axis is written as a sum of products of elements of other values.
2. It is a rotation where these sums pair up as above, with one value x that has a head's width.
3. Two elements of a table are the same where they are made from the same element by the same steps,
   as the two halves of concat(angles, angles) are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from attn_export.attention.columns import Columns, Origin, blank, tail, take
from attn_export.attention.layout import constant
from attn_export.attention.sizes import sizes

Element = tuple[int, int, int]  # identity of a value, how many last axes are counted, flat index
Term = tuple[int, tuple[Element, ...]]  # sign, factors
Sum = tuple[Term, ...]
MAX_NODES = 64  # between a rotation's end and its operands; the longest way seen takes 15


@dataclass(frozen=True)
class Table:
    """A factor for each pair: `indices` into the last `axes` axes of `value`, flattened."""

    value: ir.Value
    axes: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Rotation:
    """`output` is `x`, (..., H), with its first `size` columns turned.

    Attributes:
        size: R, as `rotary_embedding_dim` of ONNX's RotaryEmbedding.
        sources: what the tables are made from, as far as it depends on inputs.
        inner: the nodes between x, the tables and the output.
    """

    output: ir.Value
    x: ir.Value
    cos: Table
    sin: Table
    size: int
    interleaved: bool
    sources: tuple[ir.Value, ...]
    inner: tuple[ir.Node, ...]


def rotations(model: ir.Model) -> list[Rotation]:
    """The rotations of the main graph, in its order; of nested candidates the outermost."""
    found: list[Rotation] = []
    covered: set[int] = set()
    for node in reversed(model.graph):
        if id(node) in covered or not _may_end_one(node):
            continue
        rotation = find_rotation(node.outputs[0])
        if rotation is not None:
            covered |= {id(inner) for inner in rotation.inner}
            found.append(rotation)
    return found[::-1]


def find_rotation(output: ir.Value) -> Rotation | None:
    """The rotation that ends in this value, if there is one."""
    shape = tail(output, 1)
    if shape is None or shape[0] < 2:
        return None
    walk = _Walk()
    sums = list(walk.sums(output, 1))
    if walk.exhausted:
        return None
    return _match(output, sums, walk)


def _may_end_one(node: ir.Node) -> bool:
    """Cheap: two products and a sum lie shortly before it."""
    if node.op_type not in ("Add", "Concat", "Flatten", "Reshape"):
        return False
    products, sums, todo = 0, 0, [node]
    for _ in range(MAX_NODES):
        if not todo:
            break
        current = todo.pop()
        if current.op_type == "Mul":
            products += 1
            continue
        if current.op_type in ("Add", "Sub"):
            sums += 1
        elif current.op_type not in _PASSED:
            continue
        values = (
            current.inputs if current.op_type in ("Add", "Concat", "Sub") else current.inputs[:1]
        )
        todo += [p for v in values if v is not None and (p := v.producer()) is not None]
    return products > 1 and sums > 0


_PASSED = ("Concat", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")


@dataclass
class _Walk:
    """From a value back to its operands: sums of products of selected elements."""

    values: dict[int, ir.Value] = field(default_factory=dict)
    selections: dict[tuple[Element, ...], ir.Value] = field(default_factory=dict)
    nodes: dict[int, ir.Node] = field(default_factory=dict)

    @property
    def exhausted(self) -> bool:
        return len(self.nodes) > MAX_NODES

    def sums(self, value: ir.Value, axes: int) -> Columns:
        return self._arithmetic(value, axes, ("Add", "Sub", "Neg"), self.sums, self.products)

    def products(self, value: ir.Value, axes: int) -> Columns:
        return self._arithmetic(value, axes, ("Mul", "Neg"), self.products, self.factors)

    def factors(self, value: ir.Value, axes: int) -> Columns:
        found = self._arithmetic(value, axes, ("Neg",), self.factors, self.factors)
        flat = found.reshape(-1)
        if all(_single(column) for column in flat):
            self.selections.setdefault(tuple(column[0][1][0] for column in flat), value)
        return found

    def _arithmetic(
        self,
        value: ir.Value,
        axes: int,
        ops: Sequence[str],
        again: Callable[[ir.Value, int], Columns],
        operands: Callable[[ir.Value, int], Columns],
    ) -> Columns:
        """Go on at the same level through layout, and one level down through arithmetic."""
        node = value.producer()
        if node is None or self.exhausted or constant(value) is not None:
            return self._leaf(value, axes)
        self.nodes[id(node)] = node
        if (moved := take(value, axes, again, keep_lead=True)) is not None:
            return moved
        shape = tail(value, axes)
        parts = [v for v in node.inputs if v is not None]
        if node.op_type not in ops or shape is None or node.domain not in ("", "ai.onnx"):
            del self.nodes[id(node)]
            # A product is also a sum of one, and an element also a product of one.
            return self._leaf(value, axes) if again == operands else operands(value, axes)
        if any(tail(part, min(axes, len(part.shape or ()))) is None for part in parts):
            return self._leaf(value, axes)
        columns = [self._broadcast(part, axes, shape, operands) for part in parts]
        return _combine(node.op_type, columns, shape)

    def _broadcast(
        self,
        value: ir.Value,
        axes: int,
        shape: tuple[int, ...],
        operands: Callable[[ir.Value, int], Columns],
    ) -> Columns:
        own = min(axes, len(value.shape or ()))
        columns = operands(value, own) if own else self._leaf(value, 0)
        return np.broadcast_to(columns, shape)

    def _leaf(self, value: ir.Value, axes: int) -> Columns:
        self.values[id(value)] = value
        shape = tail(value, axes) if axes else ()
        return blank(shape or (), lambda index: ((1, ((id(value), axes, index),)),))


def _single(column: Sum) -> bool:
    return len(column) == 1 and column[0][0] == 1 and len(column[0][1]) == 1


def _combine(op: str, columns: Sequence[Columns], shape: tuple[int, ...]) -> Columns:
    flat = [part.reshape(-1) for part in columns]
    rows = [list(part) for part in flat]
    if op == "Neg":
        made = [tuple((-sign, factors) for sign, factors in a) for a in rows[0]]
    elif op == "Mul":
        made = [
            tuple((s * t, f + g) for s, f in a for t, g in b) for a, b in zip(*rows, strict=True)
        ]
    else:
        sign = -1 if op == "Sub" else 1
        made = [(*a, *((sign * t, g) for t, g in b)) for a, b in zip(*rows, strict=True)]
    return blank(shape, lambda index: made[index])


def _match(output: ir.Value, sums: Sequence[Sum], walk: _Walk) -> Rotation | None:
    """Pair the elements up; the first whose sum has not two terms begins what passes through."""
    size = next((i for i, column in enumerate(sums) if len(column) != 2), len(sums))
    degrees = {len(factors) for column in sums[:size] for _, factors in column}
    if size < 2 or size % 2 or degrees != {2}:
        return None
    in_all = set.intersection(
        *({factor[:2] for _, factors in column for factor in factors} for column in sums[:size])
    )
    for root in in_all:
        for interleaved in (False, True):
            pairs = [_pair(sums[i], sums[j], root) for i, j in _partners(size, interleaved)]
            if None in pairs:
                continue
            found = [pair for pair in pairs if pair is not None]
            rotation = _rotation(output, found, sums[size:], interleaved, walk)
            if rotation is not None:
                return rotation
    return None


def _partners(size: int, interleaved: bool) -> list[tuple[int, int]]:
    half = size // 2
    return [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]


Pair = tuple[Element, Element, Element, Element, Element, Element]
"""x[i], x[j], the cosine of i and of j, the sine of i and of j."""


def _pair(first: Sum, second: Sum, root: tuple[int, int]) -> Pair | None:
    """x[i] * cos - x[j] * sin, and x[j] * cos + x[i] * sin."""
    if sorted(sign for sign, _ in first) != [-1, 1] or any(sign < 0 for sign, _ in second):
        return None
    (x_i, cos_i), (x_j, sin_i) = (_factors(term, root) for term in sorted(first, reverse=True))
    other = dict(_factors(term, root) for term in second)
    if other.keys() != {x_i, x_j}:
        return None
    return x_i, x_j, cos_i, other[x_j], sin_i, other[x_i]


def _factors(term: Term, root: tuple[int, int]) -> tuple[Element, Element]:
    """The factor that is an element of the root, and the other."""
    a, b = term[1]
    return (a, b) if a[:2] == root else (b, a)


def _like(x: ir.Value, output: ir.Value) -> bool:
    """Whether x has the output's sizes, its last axis perhaps split in several."""
    lead = sizes(output)[:-1]
    behind = tail(x, len(sizes(x)) - len(lead))
    return sizes(x)[: len(lead)] == lead and behind is not None


def _rotation(
    output: ir.Value, pairs: Sequence[Pair], rest: Sequence[Sum], interleaved: bool, walk: _Walk
) -> Rotation | None:
    if not all(_single(column) for column in rest):
        return None
    firsts, seconds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    turned = [x for pair in pairs for x in pair[:2]] if interleaved else [*firsts, *seconds]
    x = walk.selections.get((*turned, *(column[0][1][0] for column in rest)))
    if x is None or not _like(x, output):
        return None
    origin = Origin()

    def origin_of(element: Element) -> object:
        identity, axes, index = element
        return origin.of(walk.values[identity], axes).reshape(-1)[index]

    tables = []
    for i, j in ((2, 3), (4, 5)):
        if any(origin_of(pair[i]) != origin_of(pair[j]) for pair in pairs):
            return None
        elements = [pair[i] for pair in pairs]
        if len({element[:2] for element in elements}) != 1:
            return None
        identity, axes, _ = elements[0]
        indices = tuple(index for _, _, index in elements)
        tables.append(Table(walk.values[identity], axes, indices))
    cos, sin = tables
    size, inner = 2 * len(pairs), tuple(walk.nodes.values())
    return Rotation(output, x, cos, sin, size, interleaved, tuple(origin.sources()), inner)
