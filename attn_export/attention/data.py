"""Which values are activations: computed from an input, not from weights, constants and sizes."""

from __future__ import annotations

import onnx_ir as ir

LENDERS = ("Shape", "Size")  # what they read lends its size, not its numbers


def activations(graph: ir.Graph) -> set[int]:
    """Identities of the values in the main graph that depend on the numbers of an input."""
    found = {id(value) for value in graph.inputs}
    for node in graph:
        if node.op_type not in LENDERS and any(id(value) in found for value in node.inputs):
            found |= {id(value) for value in node.outputs}
    return found


def inputs_behind(value: ir.Value) -> list[ir.Value]:
    """The graph inputs on whose numbers a value depends."""
    inputs: list[ir.Value] = []
    seen: set[int] = set()
    todo = [value]
    while todo:
        current = todo.pop()
        if id(current) in seen or current.is_initializer():
            continue
        seen.add(id(current))
        node = current.producer()
        if node is None:
            inputs.append(current)
        elif node.op_type not in LENDERS:
            todo += [source for source in node.inputs if source is not None]
    return inputs


def depends_on_input(value: ir.Value) -> bool:
    """Whether one value is an activation."""
    return bool(inputs_behind(value))


def mask_sources(mask: ir.Value) -> list[ir.Value]:
    """Where a mask is cut off for its proof.

    Nowhere, where it is made of weights and sizes alone. At the integer and boolean inputs that it
    is made from, where these are all: what they can block is what the model can block. At the mask
    itself in every other case, which may then hold anything.
    """
    inputs = inputs_behind(mask)
    discrete = all(v.dtype is not None and not v.dtype.is_floating_point() for v in inputs)
    return inputs if discrete else [mask]
