"""Small float32 graphs, with what float64 numpy says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from attn_export.parity.tolerance import FACTOR, HALF_FLOOR, allowed_error
from attn_export.precision.magnitudes import loaded
from attn_export.protos import in_double
from attn_export.reference import Case

Array = NDArray[np.generic]
EPS16 = 2.0**-10


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str],
    constants: Mapping[str, Array],
    dtypes: Mapping[str, int] | None = None,
) -> ir.Model:
    """A model of opset 23 with its inner types inferred; inputs float32 unless told."""
    kinds = dtypes or {}
    for index, node in enumerate(nodes):
        node.name = node.name or f"{node.op_type}_{index}"
    proto = helper.make_model(
        helper.make_graph(
            list(nodes),
            "small",
            [
                helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), list(shape))
                for n, shape in inputs.items()
            ],
            [
                helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), None)
                for n in outputs
            ],
            [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 23)],
        ir_version=10,
    )
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def case_of(model: ir.Model, inputs: Mapping[str, Array], precision: str = "fp16") -> Case:
    """The graph's own answers in float32 and in float64, and what a half graph may err."""
    proto = ir.to_proto(model)
    names = [str(value.name) for value in model.graph.outputs]
    outputs = dict(zip(names, ReferenceEvaluator(proto).run(None, dict(inputs)), strict=True))
    double = onnx.ModelProto()
    double.CopyFrom(proto)
    in_double(double)
    wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in inputs.items()}
    truth = dict(zip(names, ReferenceEvaluator(double).run(None, wide), strict=True))
    dtype = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    halves = {
        n: {"all": allowed_error(outputs[n], truth[n], dtype=dtype, floor=HALF_FLOOR)}
        for n in names
    }
    allowed = {n: {"all": FACTOR * EPS16} for n in names}
    return Case("case", "model", dict(inputs), outputs, truth, allowed, {precision: halves})


def run(model: ir.Model, inputs: Mapping[str, Array]) -> dict[str, Array]:
    with loaded(model) as session:
        return session.run(dict(inputs))
