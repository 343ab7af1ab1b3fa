"""Rotary embedding inside GroupQueryAttention, for CUDA, seen to be equal on the CPU provider."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.attention.lowering import lower
from attn_export.runtimes import ort_cpu
from tests.attention.plain import truth

N, K, H = 4, 2, 16
GQA = "com.microsoft.GroupQueryAttention"
SIZES = [{"B": 3, "S": 3, "P": 2}, {"B": 1, "S": 1, "P": 5}]


def turning(
    past: bool, interleaved: int = 0, own_keys: bool = False, dtype: type = np.float16
) -> ir.Model:
    """Causal grouped attention of queries and keys that RotaryEmbedding turns, with a cache or not.

    Row s of the tables holds the angles of position P + s.
    """
    B = 1 if past else "B"  # the op takes several new tokens beside a cache at batch 1 alone
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes = {"q": (B, "S", N * H), "k": (B, "S", K * H), "v": (B, K, "S", H)}
    if past:
        shapes |= dict.fromkeys(("past_k", "past_v"), (B, K, "P", H))
    inputs = [helper.make_tensor_value_info(n, kind, s) for n, s in shapes.items()]
    outputs = [helper.make_tensor_value_info("y", kind, (B, N, "S", H))]
    node = helper.make_node
    first = "q_shape" if not past else "past_shape"
    nodes = [
        node("Shape", ["q"], ["q_shape"], start=1, end=2),
        node("Squeeze", ["q_shape"], ["tokens"]),
    ]
    if past:
        nodes += [
            node("Shape", ["past_k"], [first], start=2, end=3), node("Squeeze", [first], ["begin"]),
            node("Add", ["begin", "tokens"], ["end"]),
            node("Range", ["begin", "end", "one"], ["p"]),
        ]  # fmt: skip
    else:
        nodes.append(node("Range", ["zero", "tokens", "one"], ["p"]))
    nodes += [
        node("Cast", ["p"], ["p_float"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["p_float", "axis1"], ["column"]),
        node("Mul", ["column", "frequencies"], ["angles"]),
        node("Cos", ["angles"], ["cos32"]), node("Cast", ["cos32"], ["cos"], to=kind),
        node("Sin", ["angles"], ["sin32"]), node("Cast", ["sin32"], ["sin"], to=kind),
        node("Neg", ["sin"], ["other_sin"]),
    ]  # fmt: skip
    for name, heads in (("q", N), ("k", K)):
        sin = "other_sin" if own_keys and name == "k" else "sin"
        nodes += [
            node("RotaryEmbedding", [name, "start", "cos", sin], [f"{name}_turned"], name=name,
                 domain="com.microsoft", num_heads=heads, interleaved=interleaved),
            node("Reshape", [f"{name}_turned", f"{name}_split"], [f"{name}_apart"]),
            node("Transpose", [f"{name}_apart"], [f"{name}_heads"], perm=[0, 2, 1, 3]),
        ]  # fmt: skip
    cache = ["", "past_k", "past_v"] if past else []
    names = ["y", "present_k", "present_v"] if past else ["y"]
    outputs += [helper.make_tensor_value_info(n, kind, (B, K, "T", H)) for n in names[1:]]
    nodes.append(node("Attention", ["q_heads", "k_heads", "v", *cache], names, is_causal=1))
    frequencies = (100.0 ** -(np.arange(H // 2) / (H // 2))).astype(np.float32)[None]
    constants = {
        "zero": np.array(0), "one": np.array(1), "axis1": np.array([1]), "start": np.array([0]),
        "frequencies": frequencies, "q_split": np.array([0, 0, N, H]),
        "k_split": np.array([0, 0, K, H]),
    }  # fmt: skip
    stored = [numpy_helper.from_array(a, name) for name, a in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(made))
    for found in model.graph:  # which no inference of com.microsoft ops gives
        if found.op_type == "RotaryEmbedding":
            found.outputs[0].shape, found.outputs[0].type = (
                found.inputs[0].shape,
                found.inputs[0].type,
            )
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))


def turned(x: np.ndarray, heads: int, begin: int, interleaved: int) -> np.ndarray:
    """(B, heads, S, H) of a (B, S, heads * H) value, in float64."""
    x = x.astype(np.float64).reshape(*x.shape[:2], heads, H).transpose(0, 2, 1, 3)
    frequencies = 100.0 ** -(np.arange(H // 2) / (H // 2))
    angles = (begin + np.arange(x.shape[2]))[:, None] * frequencies
    pairs = (
        (slice(0, H, 2), slice(1, H, 2)) if interleaved else (slice(0, H // 2), slice(H // 2, H))
    )
    result = x.copy()
    a, b = x[..., pairs[0]], x[..., pairs[1]]
    result[..., pairs[0]] = a * np.cos(angles) - b * np.sin(angles)
    result[..., pairs[1]] = b * np.cos(angles) + a * np.sin(angles)
    return result


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("S", "P"), [(4, 0), (4, 3), (1, 6)])
def test_queries_and_keys_are_turned_by_their_positions(S: int, P: int, interleaved: int) -> None:
    graph = turning(P > 0, interleaved)
    account = lower(graph, "ort-cuda", SIZES)
    assert [o.lowering for o in account.outcomes] == [GQA], account.outcomes[0].reason
    assert [found.lowering for found in account.rotary] == [GQA, GQA]
    assert "rotation" not in account.outcomes[0].reason
    (fused,) = [n for n in graph.graph if n.op_type == "GroupQueryAttention"]
    assert fused.attributes["do_rotary"].as_int() == 1
    assert "RotaryEmbedding" not in {n.op_type for n in graph.graph}
    rng = np.random.default_rng(0)
    shapes = {"q": (1, S, N * H), "k": (1, S, K * H), "v": (1, K, S, H)}
    if P:
        shapes |= {"past_k": (1, K, P, H), "past_v": (1, K, P, H)}
    given = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    with ort_cpu.load(ir.to_proto(graph).SerializeToString(), threads=1) as session:
        found = session.run(given)
    q, k = turned(given["q"], N, P, interleaved), turned(given["k"], K, P, interleaved)
    v = given["v"].astype(np.float64)
    if P:
        k = np.concatenate([given["past_k"], k], 2)
        v = np.concatenate([given["past_v"], v], 2)
        np.testing.assert_allclose(found["present_k"], k, atol=5e-3)
    keep = np.arange(P + S) <= P + np.arange(S)[:, None]
    np.testing.assert_allclose(found["y"], truth(q, k, v, keep), atol=5e-3)


def test_keys_that_are_turned_by_another_table_stay_apart() -> None:
    graph = turning(True, own_keys=True)
    account = lower(graph, "ort-cuda", SIZES)
    assert [o.lowering for o in account.outcomes] == [GQA]
    assert {found.lowering for found in account.rotary} == {"com.microsoft.RotaryEmbedding"}
    assert [n.op_type for n in graph.graph].count("RotaryEmbedding") == 2


def test_on_a_cpu_the_nodes_stay_apart() -> None:
    graph = turning(True, dtype=np.float32)
    lower(graph, "ort-cpu", SIZES, "contrib")
    assert [n.op_type for n in graph.graph].count("RotaryEmbedding") == 2
