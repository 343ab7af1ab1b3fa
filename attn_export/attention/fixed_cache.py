"""Growing caches -> buffers of a fixed capacity that past and present may share.

com.microsoft GroupQueryAttention reads as many positions of its past as `seqlens_k` and the number
of new tokens say, whatever room there is behind them, and writes the new ones there; an output that
is given the buffer of its input is continued in place (ONNX Runtime contrib operators). So a graph
whose caches grow becomes one with buffers, where the number of past tokens is an input of its own
and no longer the size of an axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from attn_export.attention.sizes import Size, plain, sizes
from attn_export.errors import ExportError
from attn_export.fixed_caches import CAPACITY, LENGTH

GROUPED = "GroupQueryAttention"
PASTS, PRESENTS = (3, 4), (1, 2)
State = tuple[str, str, int]


def growing(model: ir.Model, state: Sequence[State]) -> tuple[State, ...]:
    """Those of a model's states that are keys or values (B, K, P, H) which grow by P."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    found = []
    for output, given, axis in state:
        value = inputs.get(given)
        if value is None or value.shape is None or value.dtype is None:
            continue
        if len(value.shape) == 4 and axis == 2 and value.dtype.is_floating_point():
            present = next(v for v in model.graph.outputs if v.name == output)
            if sizes(present)[axis] != sizes(value)[axis]:
                found.append((output, given, axis))
    return tuple(found)


def new_tokens(model: ir.Model, caches: Sequence[State]) -> tuple[str, Size]:
    """(what P is called, S) of caches that grow together.

    Raises:
        ExportError: they do not, or by something else than a size of the graph.
    """
    inputs = {str(value.name): value for value in model.graph.inputs}
    outputs = {str(value.name): value for value in model.graph.outputs}
    found = set()
    for output, given, axis in caches:
        past, present = sizes(inputs[given])[axis], sizes(outputs[output])[axis]
        found.add((past, plain(present - past)))
    if len(found) != 1:
        raise ExportError(
            "the caches do not grow alike", "leave --cache-capacity out for this model"
        )
    past, new = found.pop()
    if not (isinstance(new, int) or new.is_Symbol) or isinstance(past, int):
        raise ExportError(
            f"the caches grow from {past} to {plain(past + new)} positions",
            "let each step add the tokens that it is given",
        )
    return str(past), new


def fix(model: ir.Model, caches: Sequence[State]) -> None:
    """Change a lowered graph in place.

    Args:
        caches: (output, input, axis) as `growing` found them; each must be the past of one
            GroupQueryAttention node, and the output its present.

    Raises:
        ExportError: something else reads a cache.
    """
    graph = model.graph
    length = ir.Value(name=LENGTH, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    inputs = {str(value.name): value for value in graph.inputs}
    outputs = {str(value.name): value for value in graph.outputs}
    for output, given, axis in caches:
        past, present = inputs[given], outputs[output]
        node = _owner(past, present)
        for shape in list(_shapes(past)):
            _lengthened(shape, axis, length, None)
        for shape in list(_shapes(present)):
            _lengthened(shape, axis, length, node.inputs[1])
        for value in (past, present):
            assert value.shape is not None
            value.shape = ir.Shape(
                [CAPACITY if index == axis else size for index, size in enumerate(value.shape)]
            )
    graph.inputs.append(length)
    graph.sort()


def _owner(past: ir.Value, present: ir.Value) -> ir.Node:
    """The node that continues a cache, once it is sure that nothing else touches it."""
    node = present.producer()
    owned = node is not None and node.op_type == GROUPED
    if (
        node is None
        or not owned
        or not any(
            node.inputs[i] is past and node.outputs[o] is present
            for i, o in zip(PASTS, PRESENTS, strict=True)
        )
    ):
        made = "no node" if node is None else f"{node.op_type} '{node.name}'"
        raise ExportError(
            f"'{present.name}' comes from {made} and not from GroupQueryAttention, the one op"
            " that continues a buffer in place",
            "leave --cache-capacity out for this model",
        )
    for value in (past, present):
        for use in value.uses():
            if use.node is not node and use.node.op_type != "Shape":
                raise ExportError(
                    f"'{value.name}' is also read by {use.node.op_type} '{use.node.name}', which"
                    " would see unused positions",
                    "leave --cache-capacity out for this model",
                )
    return node


def _shapes(value: ir.Value) -> Iterator[ir.Node]:
    for use in value.uses():
        if use.node.op_type == "Shape":
            yield use.node


def _lengthened(shape: ir.Node, axis: int, length: ir.Value, new: ir.Value | None) -> None:
    """Let what reads a buffer's shape see the tokens that it holds.

    Args:
        new: (B, S, ...), where the tokens of this step count as well.
    """
    value = shape.inputs[0]
    assert value is not None
    assert value.shape is not None
    rank = len(value.shape)
    start, end, _ = slice(
        shape.attributes.get_int("start", 0), shape.attributes.get_int("end", rank)
    ).indices(rank)
    if not start <= axis < end:
        return
    graph_of = shape.graph
    assert isinstance(graph_of, ir.Graph)
    made: list[ir.Node] = []

    def op(name: str, inputs: Sequence[ir.Value], **attributes: int) -> ir.Value:
        node = ir.node(name, list(inputs), attributes=attributes or None)
        node.name = f"{shape.name or value.name}/{name}_{len(made)}"
        node.outputs[0].name = f"{node.name}_0"
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        made.append(node)
        return node.outputs[0]

    filled = length
    if new is not None:
        filled = op("Add", [length, op("Shape", [new], start=1, end=2)])
    parts = [op("Shape", [value], start=start, end=axis)] if start < axis else []
    parts.append(filled)
    parts += [op("Shape", [value], start=axis + 1, end=end)] if axis + 1 < end else []
    result = op("Concat", parts, axis=0) if len(parts) > 1 else op("Identity", parts)
    result.shape = ir.Shape([end - start])
    graph_of.insert_before(shape, made)
    old = shape.outputs[0]
    for use in list(old.uses()):
        use.node.replace_input_with(use.idx, result)
    for index, output in enumerate(graph_of.outputs):
        if output is old:
            graph_of.outputs[index] = result
            old.name, result.name = f"{old.name}_room", old.name
    graph_of.remove(shape, safe=True)
