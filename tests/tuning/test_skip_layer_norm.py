"""A sum and its normalisation in one node, and out of it again."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.runtimes import ort_cpu
from attn_export.tuning.skip_layer_norm import fuse_skip_layer_norm, split_skip_layer_norm

D = 8
RNG = np.random.default_rng(0)


def model(other: list[object], *, reads_sum: bool) -> ir.Model:
    """y = LayerNormalization(x + other), and the sum itself where something reads it."""
    shape = ["batch", "tokens", D]
    given = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
        helper.make_tensor_value_info("other", TensorProto.FLOAT, other),
    ]
    names = ["y", "total"] if reads_sum else ["y"]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names]
    weights = {name: RNG.standard_normal(D).astype(np.float32) for name in ("weight", "offset")}
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    nodes = [
        helper.make_node("Add", ["x", "other"], ["total"], name="add"),
        helper.make_node("LayerNormalization", ["total", "weight", "offset"], ["y"], name="norm",
                         epsilon=1e-3),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", given, made, stored)
    info = helper.make_tensor_value_info("total", TensorProto.FLOAT, shape)
    if not reads_sum:
        graph.value_info.append(info)
    opset = [helper.make_opsetid("", 23)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opset, ir_version=10))


def run(made: ir.Model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with ort_cpu.load(ir.to_proto(made).SerializeToString(), 1, optimize=False) as session:
        return session.run(inputs)


@pytest.mark.parametrize("reads_sum", [False, True])
def test_fused_and_taken_apart_again_it_computes_the_same(reads_sum: bool) -> None:
    made = model(["batch", "tokens", D], reads_sum=reads_sum)
    inputs = {n: RNG.standard_normal((2, 3, D)).astype(np.float32) for n in ("x", "other")}
    before = run(made, inputs)
    assert fuse_skip_layer_norm(made, [{"batch": 2, "tokens": 3}]) == 1
    assert [node.op_type for node in made.graph] == ["SkipLayerNormalization"]
    fused = run(made, inputs)
    split_skip_layer_norm(made)
    assert [node.op_type for node in made.graph] == ["Add", "LayerNormalization"]
    apart = run(made, inputs)
    for name, array in before.items():
        np.testing.assert_allclose(fused[name], array, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(apart[name], array)


def test_a_sum_that_broadcasts_is_left() -> None:
    made = model([1, "tokens", D], reads_sum=True)
    assert fuse_skip_layer_norm(made, [{"batch": 2, "tokens": 3}]) == 0
    assert [node.op_type for node in made.graph] == ["Add", "LayerNormalization"]
