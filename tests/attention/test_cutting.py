"""Parts of a graph on ONNX's reference evaluator."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from attn_export.attention.cutting import evaluate_cut, evaluator


def doubling() -> onnx.ModelProto:
    """`result` = x @ 2 I, of size 3."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3])
    y = helper.make_tensor_value_info("result", TensorProto.FLOAT, [1, 3])
    weight = numpy_helper.from_array(2 * np.eye(3, dtype=np.float32), "weight")
    node = helper.make_node("MatMul", ["x", "weight"], ["result"])
    graph = helper.make_graph([node], "part", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])


def test_the_weights_of_an_evaluator_go_with_it_and_wait_for_no_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        with evaluator(doubling()) as made:
            (result,) = evaluate_cut(made, {"x": np.float32([[1, 2, 3]])})
            weight = weakref.ref(made.rt_inits_["weight"])
            assert weight() is not None
        assert weight() is None
    finally:
        gc.enable()
    assert result.tolist() == [[2, 4, 6]]
