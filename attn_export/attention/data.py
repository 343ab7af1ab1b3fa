"""Which values are activations: computed from an input, not from weights, constants and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

LENDERS = ("Shape", "Size")  # what they read lends its size, not its numbers
PICKS = ("Gather", "GatherND")  # their indices say which rows are taken
MEETINGS = ("Add", "Concat", "Mul", "RotaryEmbedding", "Sub")  # of what is made from one source


def unique(values: Iterable[ir.Value]) -> list[ir.Value]:
    """Each value once, in the order of its first appearance."""
    return list({id(value): value for value in values}.values())


def walk(
    start: Iterable[ir.Value], onward: Callable[[ir.Value], Iterable[ir.Value | None]]
) -> Iterator[ir.Value]:
    """The values themselves, and all that `onward` leads to from them, each once."""
    seen: set[int] = set()
    todo = list(start)
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        todo += [source for source in onward(value) if source is not None]


def numbers_of(value: ir.Value) -> Iterable[ir.Value | None]:
    """What the numbers of a value are computed from; nothing for weights and control flow."""
    node = value.producer()
    if node is None or node.op_type in LENDERS or subgraphs(node):
        return ()
    return node.inputs


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The bodies of an If, a Loop or a Scan."""
    return [
        graph
        for attribute in node.attributes.values()
        for graph in (
            [attribute.value]
            if attribute.type == ir.AttributeType.GRAPH
            else attribute.value if attribute.type == ir.AttributeType.GRAPHS else []
        )
    ]  # fmt: skip


def activations(graph: ir.Graph) -> set[int]:
    """Identities of the values, in subgraphs too, that depend on the numbers of an input."""
    found = {id(value) for value in graph.inputs}
    for node in graph.all_nodes():
        bodies = subgraphs(node)
        found |= {id(value) for body in bodies for value in body.inputs}
        read = any(id(value) in found for value in node.inputs)
        if bodies or (read and node.op_type not in LENDERS):
            found |= {id(value) for value in node.outputs}
    return found


def inputs_behind(value: ir.Value) -> list[ir.Value]:
    """The graph inputs, and the results of control flow, on whose numbers a value depends."""
    return [v for v in walk([value], numbers_of) if _is_source(v)]


def depends_on_input(value: ir.Value) -> bool:
    """Whether one value is an activation."""
    return any(_is_source(v) for v in walk([value], numbers_of))


def dependent(value: ir.Value) -> dict[int, ir.Value]:
    """The value and what it is computed from, by identity, as far as that depends on an input."""
    behind = {id(v): v for v in walk([value], numbers_of)}

    def readers(source: ir.Value) -> Iterator[ir.Value]:
        for node, _ in source.uses():
            if node.op_type not in LENDERS:
                yield from (output for output in node.outputs if id(output) in behind)

    sources = [v for v in behind.values() if _is_source(v)]
    return {id(v): v for v in walk(sources, readers)}


def _is_source(value: ir.Value) -> bool:
    node = value.producer()
    if node is None:
        return not value.is_initializer()
    return bool(subgraphs(node))  # what a body reads is not seen from outside


def is_computed(value: ir.Value) -> bool:
    """Whether a proof may draw this operand: it is no weight.

    One that is made of weights and sizes alone is drawn as well, as a decoder's first queries: what
    makes it may hold whole layers, with sites that were lowered before.
    """
    return not value.is_initializer()


def one_source(query: ir.Value, key: ir.Value, data: set[int]) -> bool:
    """Whether queries and keys are made from one value, as in self-attention.

    Self-attention takes queries and keys from one such value, also where positions were added or
    multiplied in, or where keys were cached; cross-attention does not. The walk goes through
    layout, weights, norms, elementwise sums and products, and ends where values meet otherwise.

    Args:
        data: what `activations` gives.
    """

    def onward(value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        sources = [v for v in node.inputs if v is not None and id(v) in data] if node else []
        if node and node.op_type in PICKS and node.inputs[0] in sources:
            return sources[:1]
        return sources if node and (len(sources) == 1 or node.op_type in MEETINGS) else []

    first, second = ({id(v) for v in walk([value], onward)} for value in (query, key))
    return bool(first & second)
