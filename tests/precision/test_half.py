"""Half graphs: what stays float32, and that the numbers are right."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from attn_export.precision.convert import convert
from attn_export.precision.half import make_half
from attn_export.precision.magnitudes import magnitudes
from attn_export.precision.plan import make_plan, summary
from attn_export.precision.stand_in import stand_in
from tests.precision.graphs import Array, case_of, graph, run

FP16, BF16 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
node = helper.make_node
LAST = {"last": np.array([-1], np.int64)}
KEYS = np.arange(4, dtype=np.float32)


def _norm(number: int, x: str, y: str) -> list[object]:
    """A layer norm that is written out."""
    n = number
    return [
        node("ReduceMean", [x, "last"], [f"mean{n}"], keepdims=1),
        node("Sub", [x, f"mean{n}"], [f"centred{n}"]),
        node("Pow", [f"centred{n}", "two"], [f"square{n}"]),
        node("ReduceMean", [f"square{n}", "last"], [f"variance{n}"], keepdims=1),
        node("Add", [f"variance{n}", "eps"], [f"safe{n}"]),
        node("Sqrt", [f"safe{n}"], [f"deviation{n}"]),
        node("Div", [f"centred{n}", f"deviation{n}"], [y]),
    ]


def _blocks() -> tuple[ir.Model, Array]:
    """Two pre-norm blocks (1, 100, 64) whose residual stream is about 300."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((64, 64)) / 8).astype(np.float32)
    model = graph(
        [*_norm(0, "x", "n"), node("MatMul", ["n", "w"], ["p"]), node("Add", ["x", "p"], ["z"]),
         *_norm(1, "z", "y")],
        {"x": [1, 100, 64]}, ["y"],
        {**LAST, "two": np.float32(2), "eps": np.float32(1e-5), "w": weight},
    )  # fmt: skip
    return model, (rng.standard_normal((1, 100, 64)) * 300).astype(np.float32)


def test_squares_of_a_residual_of_300_leave_float16_and_stay_float32() -> None:
    model, x = _blocks()
    assert (300.0 * 2) ** 2 > 65504  # two deviations, squared
    with np.errstate(over="ignore"):
        assert np.isinf(np.square(x.astype(np.float16))).any()
    case = case_of(model, {"x": x})
    made = make_half(model, "fp16", "ort-cuda", [case], {}, {})
    kept = {(row.op, row.code) for row in made.kept}
    assert {("Pow", "range"), ("ReduceMean", "range"), ("Sqrt", "range")} <= kept
    assert [n.op_type for n in made.model.graph if n.op_type == "MatMul"] == ["MatMul"]
    (product,) = (n for n in made.model.graph if n.op_type == "MatMul")
    assert [v.dtype for v in product.inputs if v is not None] == [FP16, FP16]
    answer = run(made.model, {"x": x})["y"]
    assert answer.dtype == np.float32
    assert np.abs(answer - case.truth["y"]).max() < 1e-4  # the norms are float32 on both sides


def test_one_that_squares_in_float16_is_seen_to_be_infinite_and_its_node_is_named() -> None:
    model, x = _blocks()
    case = case_of(model, {"x": x})
    made = model.clone()
    plan = make_plan(made, FP16, "ort-cpu", {}, {})  # nothing was measured
    for found in [n for n in plan.kept if n.op_type in ("Pow", "ReduceMean", "Add", "Sqrt")]:
        del plan.kept[found]
    convert(made, plan, FP16, ())
    from attn_export.precision.drift import find_drift

    (found_drift,) = find_drift(
        model, stand_in(made), [case.inputs], FP16, plan.huge,
        {str(n.name) for n in (*plan.kept, *plan.between)},
    )  # fmt: skip
    assert (found_drift.node, found_drift.code) == ("Pow_2", "overflow")


def test_a_cancelling_difference_is_found_by_running_and_its_makers_stay_float32() -> None:
    """(x + 1000) - 1000 loses x = 0.1 in float16, whose numbers lie 0.5 apart there."""
    model = graph(
        [node("Relu", ["x"], ["r"]), node("Add", ["r", "far"], ["a"]),
         node("Sub", ["a", "far"], ["y"])],
        {"x": [1, 4]}, ["y"], {"far": np.array([1000, 1000, 1000, 1000], np.float32)},
    )  # fmt: skip
    x = np.array([[0.1, 0.2, 0.3, 0.15]], np.float32)
    made = make_half(model, "fp16", "ort-cpu", [case_of(model, {"x": x})], {}, {})
    assert {(row.op, row.code) for row in made.kept} >= {("Add", "drift"), ("Sub", "drift")}
    assert made.strain <= 1
    np.testing.assert_allclose(run(stand_in(made.model), {"x": x})["y"], x, atol=2e-4)


def _masked(keep: Array, big: float) -> tuple[ir.Model, dict[str, Array]]:
    """Attention with Q = K = 0, V = [0, 1, 2, 3], and (1 - keep) * big added to the scores."""
    model = graph(
        [node("Sub", ["one", "keep"], ["blocked"]), node("Mul", ["blocked", "big"], ["bias"]),
         node("Expand", ["bias", "shape"], ["mask"]),
         node("Attention", ["q", "k", "v", "mask"], ["y"])],
        {"q": [1, 1, 4, 8], "k": [1, 1, 4, 8], "v": [1, 1, 4, 8], "keep": [1, 1, 1, 4]}, ["y"],
        {"one": np.float32(1), "big": np.float32(big), "shape": np.array([1, 1, 4, 4], np.int64)},
    )  # fmt: skip
    zeros = np.zeros((1, 1, 4, 8), np.float32)
    values = np.broadcast_to(KEYS.reshape(1, 1, 4, 1), (1, 1, 4, 8)).copy()
    return model, {"q": zeros, "k": zeros, "v": values, "keep": keep.reshape(1, 1, 1, 4)}


@pytest.mark.parametrize("big", [-1e12, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_numbers_that_block_keys_are_cut_to_the_range(big: float, precision: str) -> None:
    model, inputs = _masked(np.array([1, 1, 0, 1], np.float32), big)
    made = make_half(model, precision, "ort-cuda", [case_of(model, inputs, precision)], {}, {})
    answer = run(stand_in(made.model), inputs)["y"]
    assert np.isfinite(answer).all()
    np.testing.assert_allclose(answer[0, 0, :, 0], 4 / 3, rtol=8e-3)  # mean of 0, 1 and 3
    if precision == "fp16" or big < -1e38:  # bfloat16 ends where float32 does, almost
        assert ("Mul", "mask") in {(row.op, row.code) for row in made.kept}


def test_a_mask_that_blocks_nothing_in_the_stored_cases_is_cut_all_the_same() -> None:
    model, inputs = _masked(np.ones(4, np.float32), -1e12)
    made = make_half(model, "fp16", "ort-cpu", [case_of(model, inputs)], {}, {})
    inputs["keep"] = np.array([0, 1, 1, 0], np.float32).reshape(1, 1, 1, 4)
    np.testing.assert_allclose(run(made.model, inputs)["y"][0, 0, :, 0], 1.5, rtol=1e-3)


def test_a_query_that_finite_numbers_block_gets_the_mean_of_all_keys_as_in_float32() -> None:
    """Cast as it is, -1e12 would be -inf, and the answer 0."""
    model, inputs = _masked(np.zeros(4, np.float32), -1e12)
    made = make_half(model, "fp16", "ort-cpu", [case_of(model, inputs)], {}, {})
    np.testing.assert_allclose(run(made.model, inputs)["y"][0, 0, :, 0], 1.5, rtol=1e-3)


def test_infinities_of_a_mask_stay_infinite_beside_numbers_that_are_cut() -> None:
    """A row of -inf gives 0 on ONNX Runtime and in PyTorch, not the mean."""
    low = np.array([[-1e12] * 4, [-np.inf] * 4], np.float32)
    model = graph(
        [node("Where", ["keep", "zero", "low"], ["bias"]),
         node("Attention", ["q", "k", "v", "bias"], ["y"])],
        {"q": [1, 1, 2, 8], "k": [1, 1, 4, 8], "v": [1, 1, 4, 8], "keep": [2, 4]}, ["y"],
        {"zero": np.float32(0), "low": low}, {"keep": 9},
    )  # fmt: skip
    zeros = np.zeros((1, 1, 4, 8), np.float32)
    values = np.broadcast_to(1 + KEYS.reshape(1, 1, 4, 1), (1, 1, 4, 8)).copy()
    keep = np.array([[True, True, False, False], [False] * 4])
    inputs = {"q": zeros[:, :, :2], "k": zeros, "v": values, "keep": keep}
    made = model.clone()
    convert(made, make_plan(made, FP16, "ort-cpu", magnitudes(model, [inputs]), {}), FP16, ())
    np.testing.assert_allclose(run(made, inputs)["y"][0, 0, :, 0], [1.5, 0], atol=1e-3)
    inputs["keep"] = np.zeros((2, 4), bool)
    np.testing.assert_allclose(run(made, inputs)["y"][0, 0, :, 0], [2.5, 0], atol=1e-3)


@pytest.mark.parametrize(("precision", "runtime"), [("fp16", "ort-cpu"), ("bf16", "ort-cuda")])
def test_elu_plus_one_keeps_small_numbers(precision: str, runtime: str) -> None:
    """phi(-8) = exp(-8) is 4.88e-4 in float16's sum and 0 in bfloat16's: 0 / 0."""
    model = graph(
        [node("Elu", ["q"], ["e"]), node("Add", ["e", "one"], ["phi"]),
         node("Transpose", ["phi"], ["keys"], perm=[0, 1, 3, 2]),
         node("MatMul", ["keys", "v"], ["kv"]), node("MatMul", ["phi", "kv"], ["above"]),
         node("ReduceSum", ["phi", "tokens"], ["sums"], keepdims=1),
         node("Mul", ["phi", "sums"], ["each"]),
         node("ReduceSum", ["each", "last"], ["below"], keepdims=1),
         node("Div", ["above", "below"], ["y"])],
        {"q": [1, 1, 4, 8], "v": [1, 1, 4, 1]}, ["y"],
        {**LAST, "one": np.float32(1), "tokens": np.array([2], np.int64)},
    )  # fmt: skip
    inputs: dict[str, Array] = {
        "q": np.full((1, 1, 4, 8), -8, np.float32), "v": KEYS.reshape(1, 1, 4, 1)
    }  # fmt: skip
    case = case_of(model, inputs, precision)
    made = make_half(model, precision, runtime, [case], {}, {})
    np.testing.assert_allclose(run(stand_in(made.model), inputs)["y"].ravel(), 1.5, rtol=8e-3)
    assert {"Elu", "Add"} <= {row.op for row in made.kept}


def test_softmax_outside_of_fused_ops_stays_float32_but_not_before_a_product_on_tensorrt() -> None:
    model = graph(
        [node("MatMul", ["q", "k"], ["scores"]), node("Softmax", ["scores"], ["weights"]),
         node("MatMul", ["weights", "v"], ["y"])],
        {"q": [1, 2, 4, 8], "k": [1, 2, 8, 4], "v": [1, 2, 4, 8]}, ["y"], {},
    )  # fmt: skip
    for runtime, stays in (("ort-cpu", True), ("ort-cuda", True), ("ort-tensorrt", False)):
        plan = make_plan(model, FP16, runtime, {}, {})
        assert [row.op for row in plan.kept.values()] == (["Softmax"] if stays else []), runtime


def test_positions_sizes_and_angles_stay_float32() -> None:
    """3,001 is no float16, its neighbours are 3,000 and 3,002: the angle would be off by one."""
    model = graph(
        [node("Cast", ["ids"], ["position"], to=1), node("Mul", ["position", "rate"], ["once"]),
         node("Mul", ["once", "rate"], ["angle"]), node("Cos", ["angle"], ["turn"]),
         node("Mul", ["x", "turn"], ["y"])],
        {"x": [1, 4], "ids": [1, 4]}, ["y"], {"rate": np.float32(1)}, {"ids": 7},
    )  # fmt: skip
    inputs: dict[str, Array] = {
        "x": np.ones((1, 4), np.float32), "ids": np.array([[3001, 3003, 3005, 2049]])
    }  # fmt: skip
    made = make_half(model, "fp16", "ort-cpu", [case_of(model, inputs)], {}, {})
    assert {row.code for row in made.kept} == {"index", "op"}
    expected = np.cos(inputs["ids"].astype(np.float64))
    np.testing.assert_allclose(run(made.model, inputs)["y"], expected, atol=1e-3)


def test_inputs_and_outputs_stay_float32_and_caches_become_float16() -> None:
    model = graph(
        [node("Concat", ["past", "x"], ["present"], axis=1), node("Relu", ["present"], ["y"])],
        {"x": [1, 1], "past": [1, "P"]}, ["y", "present"], {},
    )  # fmt: skip
    made = model.clone()
    convert(made, make_plan(made, FP16, "ort-cpu", {}, {}), FP16, {"past", "present"})
    assert {v.name: v.dtype.name for v in (*made.graph.inputs, *made.graph.outputs) if v.dtype} == {
        "x": "FLOAT", "past": "FLOAT16", "y": "FLOAT", "present": "FLOAT16"
    }  # fmt: skip
    outputs = run(made, {"x": np.float32([[2]]), "past": np.float16([[1, -1]])})
    assert outputs["y"].tolist() == [[1, 0, 2]]
    assert outputs["present"].dtype == np.float16


def test_weights_that_two_types_read_are_stored_in_both_and_the_given_graph_is_left_alone() -> None:
    weight = np.array([[1.5, 2.5]], np.float32)
    model = graph(
        [node("Add", ["x", "w"], ["a"]), node("Exp", ["w"], ["b"]), node("Exp", ["a"], ["c"]),
         node("Mul", ["b", "c"], ["y"])],
        {"x": [1, 2]}, ["y"], {"w": weight},
    )  # fmt: skip
    made = model.clone()
    plan = make_plan(made, FP16, "ort-cpu", {}, {})
    plan.kept = {n: row for n, row in plan.kept.items() if n.op_type == "Exp"}
    convert(made, plan, FP16, ())
    stored = {n: v.dtype.name for n, v in made.graph.initializers.items() if v.dtype}
    assert stored == {"w": "FLOAT", "w_fp16": "FLOAT16"}
    assert {v.dtype for n in model.graph for v in n.outputs} == {ir.DataType.FLOAT}


def test_bodies_of_control_flow_stay_float32_and_read_float32() -> None:
    body = helper.make_graph(
        [node("Add", ["r", "r"], ["inside"])], "then", [],
        [helper.make_tensor_value_info("inside", 1, [1, 2])],
    )  # fmt: skip
    other = helper.make_graph(
        [node("Sub", ["r", "r"], ["outside"])], "else", [],
        [helper.make_tensor_value_info("outside", 1, [1, 2])],
    )  # fmt: skip
    model = graph(
        [node("Relu", ["x"], ["r"]),
         node("If", ["flag"], ["z"], then_branch=body, else_branch=other),
         node("Relu", ["z"], ["y"])],
        {"x": [1, 2], "flag": []}, ["y"], {}, {"flag": 9},
    )  # fmt: skip
    made = model.clone()
    plan = make_plan(made, FP16, "ort-cpu", {}, {})
    assert [row.code for row in plan.kept.values()] == ["control-flow"]
    convert(made, plan, FP16, ())
    x = np.array([[1.5, -1]], np.float32)
    assert run(made, {"x": x, "flag": np.array(True)})["y"].tolist() == [[3, 0]]
    assert run(made, {"x": x, "flag": np.array(False)})["y"].tolist() == [[0, 0]]


def test_cuda_keeps_what_it_has_no_bfloat16_kernel_for() -> None:
    weight = np.ones((1, 1, 1, 1), np.float32)
    model = graph(
        [node("Conv", ["x", "w"], ["c"]), node("Relu", ["c"], ["y"])],
        {"x": [1, 1, 2, 2]}, ["y"], {"w": weight},
    )  # fmt: skip
    kept = make_plan(model, BF16, "ort-cuda", {}, {}).kept.values()
    assert [(row.op, row.code) for row in kept] == [("Conv", "no-kernel")]
    assert not make_plan(model, FP16, "ort-cuda", {}, {}).kept
    assert summary(list(kept)) == ["1 Conv (no half kernel)"]


def test_the_stand_in_rounds_each_result_to_bfloat16() -> None:
    """1 + 1/256 lies between two bfloat16 numbers, 1 and 1 + 1/128, and goes to the even one."""
    model = graph([node("Add", ["x", "x"], ["y"])], {"x": [2]}, ["y"], {})
    made = model.clone()
    convert(made, make_plan(made, BF16, "ort-cuda", {}, {}), BF16, ())
    answer = run(stand_in(made), {"x": np.float32([1 + 1 / 256, 3])})["y"]
    assert answer.tolist() == [2, 6]
