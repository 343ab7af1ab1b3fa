"""Attention as products and a softmax: right for every form, in the order that TensorRT fuses.

Most values come from zero scores: each query then gets the mean of the values that it may see.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from attn_export.attention.lowering import lower
from attn_export.runtimes import ort_cpu

SIZES = [{"B": 3, "S": 7, "T": 4}, {"B": 1, "S": 2, "T": 5}]
FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
LOWEST = np.finfo(np.float32).min
Shape = list[int | str]


def attention(
    q: Shape,
    k: Shape,
    v: Shape,
    mask: Shape | None = None,
    kind: int = BOOL,
    constant: NDArray[np.generic] | None = None,
    **attributes: Any,
) -> ir.Model:
    """One standard Attention node from q, k, v and mask to y, decomposed."""
    values = [
        helper.make_tensor_value_info(n, FLOAT, s) for n, s in zip("qkv", (q, k, v), strict=True)
    ]
    weights = []
    if constant is not None:
        weights.append(onnx.numpy_helper.from_array(constant, "mask"))
    elif mask is not None:
        values.append(helper.make_tensor_value_info("mask", kind, mask))
    names = ["q", "k", "v", *(["mask"] if mask is not None or constant is not None else [])]
    node = helper.make_node("Attention", names, ["y"], "site", **attributes)
    result = helper.make_tensor_value_info("y", FLOAT, None)
    graph = helper.make_graph([node], "g", values, [result], weights)
    opset = [helper.make_opsetid("", 23)]
    made = helper.make_model(graph, opset_imports=opset, ir_version=10)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(made))
    (outcome,) = lower(model, "ort-cpu", SIZES, "decomposed").outcomes
    assert (outcome.lowering, outcome.status) == ("decomposed", "decomposed-by-choice")
    assert outcome.proved == "run"
    return model


def run(model: ir.Model, **inputs: NDArray[np.generic]) -> NDArray[np.generic]:
    with ort_cpu.load(ir.to_proto(model).SerializeToString(), threads=1) as session:
        return session.run(inputs)["y"]


def op_types(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def zero_scores(S: int, T: int, heads: int = 1) -> dict[str, NDArray[np.float32]]:
    """Q = K = 0 and V = 0, 1, 2 ... for each head."""
    return {
        "q": np.zeros((1, heads, S, 1), np.float32),
        "k": np.zeros((1, heads, T, 1), np.float32),
        "v": np.tile(np.arange(T, dtype=np.float32).reshape(1, 1, T, 1), (1, heads, 1, 1)),
    }


ONE_HEAD: tuple[Shape, Shape, Shape] = (["B", 1, "S", 1], ["B", 1, "T", 1], ["B", 1, "T", 1])


def truth(q: Any, k: Any, v: Any, scale: float, allowed: Any = True, cap: float = 0.0) -> Any:
    """softmax(scale * Q K^T, capped, masked) V in float64; rows without a key give 0."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = scale * q @ k.swapaxes(2, 3)
    if cap:
        scores = cap * np.tanh(scores / cap)
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * allowed
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) @ v


@pytest.mark.parametrize(("S", "T", "expected"), [
    (4, 4, [0, 0.5, 1, 1.5]),
    (2, 4, [0, 0.5]),
    (1, 4, [0]),
    (4, 2, [0, 0.5, 0.5, 0.5]),
])  # fmt: skip
def test_causal_is_aligned_upper_left_at_every_length(
    S: int, T: int, expected: list[float]
) -> None:
    model = attention(*ONE_HEAD, is_causal=1)
    assert run(model, **zero_scores(S, T)).ravel().tolist() == pytest.approx(expected)


def test_query_head_reads_the_key_head_of_its_group() -> None:
    """4 query heads, 2 key heads whose values are 1 and 2: 1, 1, 2, 2 and not 1, 2, 1, 2."""
    model = attention(["B", 4, "S", 1], ["B", 2, "T", 1], ["B", 2, "T", 1])
    v = np.broadcast_to(np.array([1, 2], np.float32).reshape(1, 2, 1, 1), (1, 2, 3, 1))
    zero = np.zeros((1, 4, 2, 1), np.float32)
    result = run(model, q=zero, k=np.zeros((1, 2, 3, 1), np.float32), v=v.copy())
    np.testing.assert_allclose(result[0, :, :, 0], [[1, 1], [1, 1], [2, 2], [2, 2]])


def test_packed_grouped_causal_softcapped_attention_equals_float64() -> None:
    """(B, S, N * H) inputs, N = 4, K = 2, H = 8, Hv = 6."""
    heads = {"q_num_heads": 4, "kv_num_heads": 2}
    shapes: tuple[Shape, Shape, Shape] = (["B", "S", 32], ["B", "T", 16], ["B", "T", 12])
    model = attention(*shapes, is_causal=1, softcap=2.0, scale=0.7, **heads)
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((3, n, w)).astype(np.float32)
               for n, w in ((5, 32), (9, 16), (9, 12)))  # fmt: skip
    apart = [a.reshape(3, n, h, -1).swapaxes(1, 2) for a, n, h in ((q, 5, 4), (k, 9, 2), (v, 9, 2))]
    expected = truth(*apart, 0.7, np.tri(5, 9), 2.0).swapaxes(1, 2).reshape(3, 5, 24)
    np.testing.assert_allclose(run(model, q=q, k=k, v=v), expected, atol=2e-6)


def test_the_mask_comes_after_the_softcap() -> None:
    """Softcap 2, the last key blocked: the mean of 0, 1, 2. Before it, 1.0863 would leak."""
    model = attention(*ONE_HEAD, ["B", 1, "S", "T"], softcap=2.0)
    mask = np.array([True, True, True, False]).reshape(1, 1, 1, 4)
    result = run(model, **zero_scores(1, 4), mask=mask)
    assert result.ravel().tolist() == pytest.approx([1.0])


ROWS = {
    "a hole": ([0, -np.inf, 0, -np.inf], 1.0),
    "all -inf": ([-np.inf] * 4, 0.0),
    "all of the most negative number": ([LOWEST] * 4, 1.5),
    "the most negative number beside -inf": ([-np.inf, LOWEST, LOWEST, LOWEST], 2.0),
    "the most negative number beside 0": ([0, 0, LOWEST, LOWEST], 0.5),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4), (1, 1, 1, 4)])
def test_additive_rows_get_what_pytorch_gives(name: str, shape: tuple[int, ...]) -> None:
    row, expected = ROWS[name]
    model = attention([1, 1, 1, 1], [1, 1, 4, 1], [1, 1, 4, 1], list(shape), FLOAT)
    mask = np.array(row, np.float32).reshape(shape)
    result = run(model, **zero_scores(1, 4), mask=mask)
    assert result.ravel().tolist() == pytest.approx([expected])


def test_a_bool_row_without_a_key_gives_zero() -> None:
    model = attention(*ONE_HEAD, ["B", 1, "S", "T"])
    mask = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 1]], bool).reshape(1, 1, 3, 4)
    result = run(model, **zero_scores(3, 4), mask=mask)
    assert result.ravel().tolist() == pytest.approx([1.0, 0.0, 2.5])


def test_a_row_that_mask_and_causality_block_together_gives_zero() -> None:
    """Query 0 may only see key 0, and the mask hides key 0; query 1 then sees key 1 alone."""
    model = attention(*ONE_HEAD, ["S", "T"], is_causal=1)
    mask = np.array([[0, 1, 1], [0, 1, 1]], bool)
    result = run(model, **zero_scores(2, 3), mask=mask)
    assert result.ravel().tolist() == pytest.approx([0.0, 1.0])


def test_a_query_that_is_not_a_number_stays_one() -> None:
    model = attention(*ONE_HEAD, ["B", 1, "S", "T"])
    inputs = zero_scores(2, 2)
    inputs["q"][0, 0, 1, 0] = np.nan
    result = run(model, **inputs, mask=np.ones((1, 1, 2, 2), bool))
    assert result.ravel().tolist() == pytest.approx([0.5, np.nan], nan_ok=True)


def test_the_order_is_the_one_that_tensorrt_fuses() -> None:
    """Scale on the query before the first product; nothing between softmax and second product."""
    model = attention(*ONE_HEAD, ["S", "T"], scale=0.5)
    scores, weighted = (node for node in model.graph if node.op_type == "MatMul")
    (masked,) = (node for node in model.graph if node.op_type == "Add")
    assert scores.inputs[0].producer().op_type == "Mul"
    assert masked.inputs[0] is scores.outputs[0]
    assert weighted.inputs[0].producer().op_type == "Softmax"
    bias = masked.inputs[1].producer()
    assert [bias.op_type, bias.inputs[0].producer().op_type] == ["Where", "Unsqueeze"]


def test_without_a_mask_nothing_but_attention_is_left() -> None:
    model = attention(*ONE_HEAD, scale=0.5)
    assert op_types(model) == ["Mul", "Transpose", "MatMul", "Softmax", "MatMul"]


def test_a_constant_mask_in_which_each_query_sees_a_key_needs_no_guard() -> None:
    shapes: tuple[Shape, Shape, Shape] = ([1, 1, 2, 1], [1, 1, 2, 1], [1, 1, 2, 1])
    open_ = attention(*shapes, constant=np.array([[True, False], [True, True]]))
    blocked = attention(*shapes, constant=np.array([[False, False], [True, True]]))
    assert "ReduceMax" not in op_types(open_)
    assert "ReduceMax" in op_types(blocked)
    assert run(open_, **zero_scores(2, 2)).ravel().tolist() == pytest.approx([0.0, 0.5])
    assert run(blocked, **zero_scores(2, 2)).ravel().tolist() == pytest.approx([0.0, 0.5])


def with_cache(is_causal: int, mask: bool) -> ir.Model:
    """q, k, v, past_key and past_value to y, present_key and present_value, heads of size 1."""
    sizes = {"q": "S", "k": "S", "v": "S", "past_key": "P", "past_value": "P"}
    values = [helper.make_tensor_value_info(n, FLOAT, ["B", 1, t, 1]) for n, t in sizes.items()]
    names = ["q", "k", "v", "mask" if mask else "", "past_key", "past_value"]
    if mask:
        values.append(helper.make_tensor_value_info("mask", BOOL, ["S", "P + S"]))
    outputs = ["y", "present_key", "present_value"]
    node = helper.make_node("Attention", names, outputs, "site", is_causal=is_causal)
    results = [helper.make_tensor_value_info("y", FLOAT, ["B", 1, "S", 1])]
    results += [helper.make_tensor_value_info(n, FLOAT, ["B", 1, "P + S", 1]) for n in outputs[1:]]
    graph = helper.make_graph([node], "g", values, results)
    opset = [helper.make_opsetid("", 23)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opset, ir_version=10))
    sizes_of = [{"B": 2, "S": 3, "P": 4}, {"B": 1, "S": 1, "P": 2}]
    (outcome,) = lower(model, "ort-cpu", sizes_of, "decomposed").outcomes
    assert (outcome.lowering, outcome.proved) == ("decomposed", "run")
    return model


def decoded(model: ir.Model, **more: NDArray[np.generic]) -> dict[str, NDArray[np.generic]]:
    """Zero scores; past values 0 and 1, new ones 2 and 3."""
    new = np.array([2, 3], np.float32).reshape(1, 1, 2, 1)
    zero = np.zeros_like(new)
    inputs = {"q": zero, "k": zero, "v": new, "past_key": zero, "past_value": new - 2, **more}
    with ort_cpu.load(ir.to_proto(model).SerializeToString(), threads=1) as session:
        return session.run(inputs)


def test_the_past_comes_first_and_is_seen_by_every_query() -> None:
    model = with_cache(1, False)
    result = decoded(model)
    assert "Attention" not in op_types(model)
    assert result["y"].ravel().tolist() == pytest.approx([1.0, 1.5])
    assert result["present_value"].ravel().tolist() == [0, 1, 2, 3]


def test_a_mask_over_past_and_new_keys_hides_either() -> None:
    mask = np.array([[0, 1, 1, 1], [1, 0, 0, 1]], bool)
    result = decoded(with_cache(0, True), mask=mask)
    assert result["y"].ravel().tolist() == pytest.approx([2.0, 1.5])


@pytest.mark.parametrize(("mode", "expected"), [(0, [2.0, 2.0]), (3, [0.5, 0.5])])
def test_scores_or_weights_are_returned_where_they_are_read(
    mode: int, expected: list[float]
) -> None:
    """Q K^T = 4 at scale 0.5 for both keys."""
    values = [helper.make_tensor_value_info(n, FLOAT, ["B", 1, s, 1]) for n, s in
              (("q", "S"), ("k", "T"), ("v", "T"))]  # fmt: skip
    node = helper.make_node("Attention", ["q", "k", "v"], ["y", "", "", "scores"], "site",
                            qk_matmul_output_mode=mode, scale=0.5)  # fmt: skip
    results = [helper.make_tensor_value_info("y", FLOAT, ["B", 1, "S", 1]),
               helper.make_tensor_value_info("scores", FLOAT, ["B", 1, "S", "T"])]  # fmt: skip
    graph = helper.make_graph([node], "g", values, results)
    opset = [helper.make_opsetid("", 23)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opset, ir_version=10))
    (outcome,) = lower(model, "ort-cpu", SIZES, "decomposed").outcomes
    assert (outcome.lowering, outcome.proved) == ("decomposed", "run")
    two = np.full((1, 1, 2, 1), 2, np.float32)
    with ort_cpu.load(ir.to_proto(model).SerializeToString(), threads=1) as session:
        result = session.run({"q": two[:, :, :1], "k": two, "v": two})
    assert result["scores"].ravel().tolist() == pytest.approx(expected)
