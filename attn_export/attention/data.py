"""Which values are activations: computed from an input, not from weights, constants and sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

LENDERS = ("Shape", "Size")  # what they read lends its size, not its numbers
MEETINGS = ("Add", "Concat", "Mul", "RotaryEmbedding", "Sub")  # of a value with its positions
BLOCKING = -1e4
"""A constant at or below this blocks a key: exp of it is 0 next to any real score."""
CARRIERS = {
    "Add", "Cast", "CastLike", "Concat", "Div", "Expand", "Gather", "Identity", "Max", "Min", "Mul",
    "Neg", "Pad", "Reshape", "Slice", "Squeeze", "Sub", "Tile", "Transpose", "Trilu", "Unsqueeze",
    "Where",
}  # fmt: skip


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


def one_source(query: ir.Value, key: ir.Value, data: set[int]) -> bool:
    """Whether queries and keys are made from one value, as in self-attention.

    Args:
        data: what `activations` gives.
    """
    return bool(_sources(query, data) & _sources(key, data))


def _sources(value: ir.Value, data: set[int]) -> set[int]:
    """The values that this one is computed from without attending to anything.

    Self-attention takes queries and keys from one such value, also where positions were added or
    multiplied in, or where keys were cached; cross-attention does not. The walk goes through
    layout, weights, norms, elementwise sums and products, and ends where values meet otherwise.
    """
    found: set[int] = set()
    todo = [value]
    while todo:
        current = todo.pop()
        if id(current) in found:
            continue
        found.add(id(current))
        node = current.producer()
        if node is None:
            continue
        sources = [v for v in node.inputs if v is not None and id(v) in data]
        if len(sources) == 1 or node.op_type in MEETINGS:
            todo.extend(sources)
    return found


def inputs_behind(value: ir.Value) -> list[ir.Value]:
    """The graph inputs, and the results of control flow, on whose numbers a value depends."""
    inputs: list[ir.Value] = []
    seen: set[int] = set()
    todo = [value]
    while todo:
        current = todo.pop()
        if id(current) in seen or current.is_initializer():
            continue
        seen.add(id(current))
        node = current.producer()
        if node is None or subgraphs(node):  # what a body reads is not seen from outside
            inputs.append(current)
        elif node.op_type not in LENDERS:
            todo += [source for source in node.inputs if source is not None]
    return inputs


def depends_on_input(value: ir.Value) -> bool:
    """Whether one value is an activation."""
    return bool(inputs_behind(value))


def is_computed(value: ir.Value) -> bool:
    """Whether a proof may draw this operand: it is no weight.

    One that is made of weights and sizes alone is drawn as well, as a decoder's first queries: what
    makes it may hold whole layers, with sites that were lowered before.
    """
    return not value.is_initializer()


def mask_sources(mask: ir.Value) -> list[ir.Value]:
    """Where a mask is cut off for its proof.

    Nowhere, where it is made of weights and sizes alone. At the integer and boolean inputs that it
    is made from: what they can block is what the model can block. Ordinary numbers that are added,
    as products of queries with positions, are cut where they are computed: whole layers may stand
    between them and token ids. At the mask itself in every other case, which may then hold
    anything: where a float input is a part of it, or has a say in what is blocked.
    """
    behind = inputs_behind(mask)
    discrete = all(v.dtype is not None and not v.dtype.is_floating_point() for v in behind)
    found: dict[int, ir.Value] = {}
    seen: set[tuple[int, bool]] = set()
    todo = [(mask, True)]
    while todo:
        value, numbers = todo.pop()  # numbers: it reaches the mask as numbers, not as a choice
        if (id(value), numbers) in seen or not depends_on_input(value):
            continue
        seen.add((id(value), numbers))
        node = value.producer()
        floating = value.dtype is None or value.dtype.is_floating_point()
        if floating and (node is None or not (numbers or discrete)):
            return [mask]
        ordinary = floating and numbers and node is not None and node.op_type not in CARRIERS
        if node is None or subgraphs(node) or ordinary:
            found[id(value)] = value
        elif node.op_type not in LENDERS:
            up = numbers and floating
            todo += [(source, up) for source in node.inputs if source is not None]
    return list(found.values())


def may_block(bias: ir.Value) -> bool:
    """Whether a bias may hold -inf or the most negative number, as a mask does.

    Products, norms and tables of weights give ordinary numbers; what an input brings along, or a
    large negative constant, comes through sums, choices and layout alone.
    """
    seen: set[int] = set()
    todo = [bias]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        node = value.producer()
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None:
            if value.dtype is not None and value.dtype.is_floating_point():
                numbers = tensor.numpy()
                if numbers.size and float(numbers.min()) <= BLOCKING:
                    return True
        elif node is None:
            return True
        elif node.op_type in CARRIERS:
            todo += [source for source in node.inputs if source is not None]
    return False


def cut_sources(values: Sequence[ir.Value]) -> list[ir.Value]:
    """Where values that act on one attention together are cut off: as `mask_sources`, jointly.

    A mask and a guard that are made from one value are cut at that value, lest they be drawn apart.
    Biases that block nothing may be: any numbers will do for them.
    """
    apart = [v for v in values if mask_sources(v) == [v] and _says_what_is_seen(v)]
    found = [source for value in values for source in mask_sources(value)]
    meeting = _meeting(apart) if len(apart) > 1 else []
    if meeting:
        found = [v for v in found if all(v is not value for value in apart)] + meeting
    return list({id(value): value for value in found}.values())


def _says_what_is_seen(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.BOOL or may_block(value)


def _meeting(values: Sequence[ir.Value]) -> list[ir.Value]:
    """The last values that all of these are made from, if they are made from nothing else."""
    behind = [_ancestors(value) for value in values]
    shared = set(behind[0]).intersection(*behind[1:])
    last = {
        key: behind[0][key]
        for key in shared
        if not any(id(out) in shared for use in behind[0][key].uses() for out in use.node.outputs)
    }
    for value in values:
        if any(source.producer() is None for source in _ancestors(value, stop=last).values()):
            return []
    return list(last.values())


def _ancestors(value: ir.Value, stop: Collection[int] = ()) -> dict[int, ir.Value]:
    """The value and what it depends on, by identity; nothing at or behind `stop`."""
    found: dict[int, ir.Value] = {}
    todo = [value]
    while todo:
        current = todo.pop()
        if id(current) in found or id(current) in stop or not depends_on_input(current):
            continue
        found[id(current)] = current
        node = current.producer()
        if node is not None and node.op_type not in LENDERS:
            todo += [source for source in node.inputs if source is not None]
    return found
