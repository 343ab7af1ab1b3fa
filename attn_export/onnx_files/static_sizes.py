"""Sizes that a graph reads from shapes though they never vary become constants.

Older exporters write the scale of attention as 1 / sqrt(the last size of a query), from Shape on.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript.optimizer import fold_constants

from attn_export.attention.layout import constant


class StaticSizesPass(ir.passes.InPlacePass):
    """Replace what Shape, or a Gather or Slice of it, gives where that is known, and fold."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Sizes must be inferred; onnxscript folds what is computed from the new constants."""
        changed = False
        for node in list(model.graph.all_nodes()):
            if node.op_type != "Shape" or node.domain not in ("", "ai.onnx"):
                continue
            changed |= _replace(node.outputs[0], _read(node))
            for use in list(node.outputs[0].uses()):
                changed |= _replace(use.node.outputs[0], _picked(_read(node), use.node))
        if changed:
            fold_constants(model, onnx_shape_inference=False)
        return ir.passes.PassResult(model, changed)


def _read(node: ir.Node) -> list[int | ir.SymbolicDim] | None:
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", 1 << 31)
    return list(source.shape)[start:end]


def _picked(sizes: list[int | ir.SymbolicDim] | None, node: ir.Node) -> object:
    """What a Gather or Slice along the one axis of a shape gives: a size, some of them, or None."""
    rows = [constant(value) for value in node.inputs[1:]]
    if sizes is None or any(row is None for row in rows):
        return None
    numbers = [row.reshape(-1).astype(np.int64).tolist() for row in rows if row is not None]
    if node.op_type == "Gather" and rows[0] is not None:
        chosen = [sizes[i] if -len(sizes) <= i < len(sizes) else None for i in numbers[0]]
        return chosen[0] if rows[0].ndim == 0 else chosen
    if node.op_type == "Slice":
        step = numbers[3][0] if len(numbers) > 3 else 1
        return sizes[numbers[0][0] : numbers[1][0] : step]
    return None


def _replace(value: ir.Value, sizes: object) -> bool:
    """Put a constant in place of a value where all of these sizes are known."""
    row = sizes if isinstance(sizes, list) else [sizes]
    if not all(isinstance(size, int) for size in row) or value.is_graph_output():
        return False
    array: NDArray[np.int64] = np.array(sizes, dtype=np.int64)
    node = value.producer()
    if node is None or node.graph is None or not value.uses():
        return False
    made = ir.node("Constant", [], attributes={"value": ir.tensor(array)})
    made.name, made.outputs[0].name = f"{node.name}/size", f"{value.name}/size"
    made.outputs[0].shape, made.outputs[0].type = ir.Shape(array.shape), value.type
    made.outputs[0].const_value = ir.tensor(array)
    node.graph.insert_before(node, [made])
    value.replace_all_uses_with(made.outputs[0])
    return True
