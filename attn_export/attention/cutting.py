"""Parts of a graph as models of their own, run on ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from attn_export.attention.data import unique
from attn_export.attention.reference_ops import OPS
from attn_export.errors import one_line
from attn_export.runtimes.base import Arrays


def result_name(index: int) -> str:
    """The name of an output of a part."""
    return f"result_{index}" if index else "result"


def shape_lenders(outputs: Sequence[ir.Value], inputs: Sequence[ir.Value]) -> list[ir.Value]:
    """Values outside of the cut-out that only lend it a size: Shape nodes read them."""
    inside = {id(value) for value in inputs}
    lenders: list[ir.Value] = []
    todo = list(outputs)
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None or id(value) in inside:
            continue
        inside.add(id(value))
        sources = [source for source in node.inputs if source is not None]
        (lenders if node.op_type in ("Shape", "Size") else todo).extend(sources)
    return unique(value for value in lenders if id(value) not in inside)


def cut(
    model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> onnx.ModelProto:
    """The part of the graph between values: inputs `input_0` and on, outputs as `result_name`.

    In the body of an If, a Loop or a Scan it may begin at values of the graph around that.

    Raises:
        ValueError: it begins somewhere else as well.
    """
    producer = outputs[0].producer()
    scope = producer.graph if producer is not None and producer.graph is not None else model.graph
    # a view, since a graph itself refuses to begin at values that it does not own
    nodes = scope if scope is model.graph else ir.GraphView((), outputs, nodes=tuple(scope))
    try:
        graph = ir.convenience.extract(nodes, list(inputs), list(outputs))
    except KeyError as outside:
        raise ValueError("it is computed from nodes around the body that it lies in") from outside
    for index, value in enumerate(graph.outputs):
        value.name = result_name(index)
    for index, value in enumerate(graph.inputs):
        value.name = f"input_{index}"
    imports = {**model.opset_imports, "com.microsoft": 1}
    graph.opset_imports.update(imports)
    part = ir.Model(graph, ir_version=model.ir_version)
    return ir.to_proto(ir.external_data.load_to_model(part))  # weights beside a file come along


def double(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Floats as float64, everything else as it is."""
    return array.astype(np.float64) if array.dtype.kind == "f" else array


@contextmanager
def evaluator(part: onnx.ModelProto) -> Iterator[ReferenceEvaluator]:
    """ONNX's reference evaluator of a part, whose weights are let go of at the end.

    An evaluator refers to itself, so that it would keep its copy of them until the next collection.
    """
    made = ReferenceEvaluator(part, new_ops=OPS)
    try:
        yield made
    finally:
        vars(made).clear()


def evaluate_cut(model: ReferenceEvaluator, inputs: Arrays) -> list[NDArray[np.generic]]:
    """The outputs; a blocked row of -inf may give NaN on the way, which numpy warns of.

    Raises:
        ValueError: the evaluator does not run it.
    """
    try:
        with np.errstate(all="ignore"):
            return [np.asarray(array) for array in model.run(None, inputs)]
    except Exception as error:  # whatever an operator of the evaluator raises
        raise ValueError(
            f"ONNX's reference evaluator does not run it ({one_line(error)})"
        ) from error
