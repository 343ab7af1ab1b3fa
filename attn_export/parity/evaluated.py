"""A few nodes of a graph on ONNX's reference evaluator in float64: what they should have given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from attn_export.parity.flow import Flow
from attn_export.parity.tolerance import Array
from attn_export.protos import in_double

SLOW = {"Conv", "ConvTranspose", "GridSample"}  # loops in Python there
LIMIT = 2**24  # elements that the nodes begin with
Values = Callable[[Sequence[str]], Mapping[str, Array]]


def evaluate_nodes(
    model: onnx.ModelProto, flow: Flow, nodes: Sequence[int], value: str, values: Values
) -> Array | None:
    """What `nodes`, the last of which gives `value`, compute from what they read.

    Args:
        values: name -> array for values, inputs and weights of the graph.

    None where the evaluator does not have their ops, is slow on them or fails.
    """
    part = [flow.nodes[index] for index in nodes]
    given = {name for node in part for name in node.output}
    reads = dict.fromkeys(name for node in part for name in node.input if name)
    begins = [name for name in reads if name not in given]
    if any(_is_foreign(node) for node in part):
        return None
    arrays = values(begins)
    if sum(array.size for array in arrays.values()) > LIMIT:
        return None
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in arrays.items()
    ]
    output = helper.make_tensor_value_info(value, onnx.TensorProto.DOUBLE, None)
    graph = helper.make_graph(part, "part", inputs, [output])
    cut = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    in_double(cut)
    wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in arrays.items()}
    try:
        with np.errstate(all="ignore"):  # blocked rows give NaN on the way
            (made,) = ReferenceEvaluator(cut).run(None, wide)
    except Exception:  # whatever an operator of the evaluator raises: it has no opinion then
        return None
    return np.asarray(made)


def _is_foreign(node: onnx.NodeProto) -> bool:
    """Not of ONNX itself, slow, or with a body that may read anything around it."""
    bodies = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
    return node.domain not in ("", "ai.onnx") or node.op_type in SLOW or bodies
