"""Fused nodes become standard ones that compute the same, so that they can be lowered anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.attention.unfuse import unfuse
from attn_export.runtimes import ort_cpu

B, S, N, H, HV = 2, 5, 2, 4, 3
D = N * H
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def model(
    node: onnx.NodeProto,
    inputs: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
    outputs: dict[str, tuple[int, ...]],
) -> ir.Model:
    given = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
        for name, array in inputs.items()
    ]
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "g", given, made, stored)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def contrib(op: str, inputs: Sequence[str], outputs: Sequence[str] = ("y",), **attributes: object):
    return helper.make_node(op, inputs, outputs, name="site", domain="com.microsoft", **attributes)


def run(model: ir.Model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with ort_cpu.load(ir.to_proto(model).SerializeToString(), 1) as session:
        return session.run(inputs)


def ops(model: ir.Model) -> list[str]:
    return [f"{node.domain}.{node.op_type}".removeprefix(".") for node in model.graph]


def same(model: ir.Model, inputs: dict[str, np.ndarray], *, packed: bool = False) -> ir.Model:
    before = run(model, inputs)
    assert unfuse(model, packed=packed) == []
    after = run(model, inputs)
    assert after.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, rtol=1e-5, atol=2e-6)
    return model


def projected(bias: bool, *, causal: int = 0) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """com.microsoft Attention whose values are of another size than queries and keys."""
    width = 2 * D + N * HV
    weights = {"w": floats(D, width), "b": floats(width)}
    inputs = {"x": floats(B, S, D)}
    names = ["x", "w", "b"]
    if bias:
        inputs["bias"] = floats(1, N, S, S)
        names += ["", "", "bias"]
    node = contrib(
        "Attention", names, num_heads=N, qkv_hidden_sizes=[D, D, N * HV], scale=0.3,
        unidirectional=causal,
    )  # fmt: skip
    return model(node, inputs, weights, {"y": (B, S, N * HV)}), inputs


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_projections_come_out_of_attention(bias: bool, packed: bool) -> None:
    made = same(*projected(bias), packed=packed)
    products = ["MatMul", "Add", "Split"] if packed else ["MatMul", "Add"] * 3
    assert ops(made) == [*products, "Attention"]


def test_a_causal_flag_is_kept() -> None:
    made = same(*projected(False, causal=1))
    assert made.graph[-1].attributes["is_causal"].as_int() == 1


@pytest.mark.parametrize("apart", [False, True])
def test_queries_keys_and_values_are_taken_as_they_lie(apart: bool) -> None:
    T = 7
    key = floats(B, N, T, H) if apart else floats(B, T, D)
    value = floats(B, N, T, H) if apart else floats(B, T, D)
    inputs = {"q": floats(B, S, D), "k": key, "v": value, "bias": floats(1, 1, S, T)}
    node = contrib("MultiHeadAttention", ["q", "k", "v", "", "", "bias"], num_heads=N, scale=0.4)
    made = same(model(node, inputs, {}, {"y": (B, S, D)}), inputs)
    assert ops(made).count("Attention") == 1
    assert not any(op.startswith("com.microsoft") for op in ops(made))


def test_a_cache_goes_in_and_out() -> None:
    P = 3
    inputs = {"q": floats(B, S, D), "k": floats(B, S, D), "v": floats(B, S, D),
              "pk": floats(B, N, P, H), "pv": floats(B, N, P, H)}  # fmt: skip
    node = contrib("MultiHeadAttention", ["q", "k", "v", "", "", "", "pk", "pv"],
                   ["y", "present_k", "present_v"], num_heads=N)  # fmt: skip
    shapes = {"y": (B, S, D), "present_k": (B, N, P + S, H), "present_v": (B, N, P + S, H)}
    same(model(node, inputs, {}, shapes), inputs)


def test_what_standard_attention_cannot_say_stays() -> None:
    lengths = helper.make_tensor_value_info("lengths", TensorProto.INT32, [B])
    made, _ = projected(False)
    made.graph[0].replace_input_with(0, made.graph[0].inputs[0])
    proto = ir.to_proto(made)
    proto.graph.input.append(lengths)
    proto.graph.node[0].input.append("lengths")
    kept = ir.from_proto(proto)
    assert unfuse(kept) == ["site"]
    assert ops(kept) == ["com.microsoft.Attention"]
