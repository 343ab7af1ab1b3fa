"""The truth of a part is the same computation in float64, whatever way its constants are held."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from attn_export.protos import in_double

TENSOR = numpy_helper.from_array(np.array(0.1, np.float32))


@pytest.mark.parametrize(
    "constant", [{"value": TENSOR}, {"value_float": 0.1}, {"value_floats": [0.1, 0.1]}]
)
def test_a_comparison_with_a_constant_runs_in_double(constant: dict[str, object]) -> None:
    nodes = [
        helper.make_node("Constant", [], ["c"], **constant),
        helper.make_node("Equal", ["x", "c"], ["same"]),
        helper.make_node("Where", ["same", "x", "c"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    graph = helper.make_graph(nodes, "part", [x], [y])
    doubled = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    in_double(doubled)
    numbers = np.array([np.float32(0.1), 3.0], np.float64)
    (result,) = ReferenceEvaluator(doubled).run(None, {"x": numbers})
    assert result.dtype == np.float64
    assert result.tolist() == [np.float32(0.1)] * 2
