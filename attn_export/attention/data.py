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


def depends_on_input(value: ir.Value) -> bool:
    """Whether one value is an activation."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        current = todo.pop()
        if id(current) in seen or current.is_initializer():
            continue
        seen.add(id(current))
        node = current.producer()
        if node is None:
            return True
        if node.op_type not in LENDERS:
            todo += [source for source in node.inputs if source is not None]
    return False
