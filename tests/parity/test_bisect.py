"""The search for the first wrong value, on graphs that are small enough to do by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx.helper import make_node

from attn_export.parity import exposing
from attn_export.parity.bisect import bisect
from attn_export.parity.exposing import Exposable, chunks, in_single, is_half
from attn_export.parity.trace import expect
from attn_export.parity.yardstick import deviations
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import Session
from tests.parity.graphs import HALF, SHAPE, model

Array = NDArray[np.generic]
RESIDUAL = 300.0  # what the residual stream of a detector reaches
AXIS = np.array([-1])


def plain(proto: onnx.ModelProto) -> Exposable:
    return Exposable(proto, lambda data: ort_cpu.load(data, optimize=False))


def optimised(proto: onnx.ModelProto) -> Exposable:
    return Exposable(proto, ort_cpu.load)


def differs_from(
    right: Mapping[str, Array], by: float
) -> Callable[[Mapping[str, Array]], list[str]]:
    def wrong(outputs: Mapping[str, Array]) -> list[str]:
        far = {n: np.abs(a.astype(np.float64) - right[n]).max() for n, a in outputs.items()}
        return [name for name, distance in far.items() if not distance <= by]

    return wrong


def chain(factor: float = 2.0) -> onnx.ModelProto:
    """y = |x * factor + 1| - 1"""
    return model(
        [
            make_node("Mul", ["x", "factor"], ["scaled"]),
            make_node("Add", ["scaled", "one"], ["moved"]),
            make_node("Abs", ["moved"], ["size"]),
            make_node("Sub", ["size", "one"], ["y"]),
        ],
        {"factor": np.array(factor, np.float32), "one": np.array(1.0, np.float32)},
    )


X = np.arange(32.0, dtype=np.float32).reshape(SHAPE) + 1
RIGHT = {"y": X * 2.0}
TRACE = {"scaled": expect(X * 2.0), "moved": expect(X * 2.0 + 1), "size": expect(X * 2.0 + 1)}


def test_where_no_output_is_wrong_there_is_no_drift() -> None:
    assert bisect(plain(chain()), {"x": X}, differs_from(RIGHT, 1e-3), TRACE) is None


def test_the_first_wrong_value_is_named_and_the_graph_is_to_blame() -> None:
    wrong = chain(2.5)
    found = bisect(optimised(wrong), {"x": X}, differs_from(RIGHT, 1e-3), TRACE, plain(wrong))
    assert found is not None
    assert (found.value, found.cause, found.yardstick) == ("scaled", "graph", "pytorch")
    assert found.place is not None
    assert (found.place.node, found.place.op, found.site) == ("node_scaled", "Mul", "")
    assert found.deviation is not None
    assert found.deviation.where == (0, 3, 7)
    assert found.deviation.error == 16.0  # half of 32


def test_a_value_that_the_trace_has_not_leaves_the_nodes_between() -> None:
    trace = {"size": TRACE["size"]}
    wrong = chain(2.5)
    found = bisect(optimised(wrong), {"x": X}, differs_from(RIGHT, 1e-3), trace, plain(wrong))
    assert found is not None
    assert found.value == "size"
    assert found.between == ("node_scaled", "node_moved", "node_size")
    assert found.place is not None
    assert found.place.node == "node_scaled"


def test_a_wrong_value_that_reaches_no_wrong_output_is_not_to_blame() -> None:
    proto = chain(2.5)
    dead = make_node("Neg", ["x"], ["aside"])
    proto.graph.node.insert(0, dead)
    trace = {**TRACE, "aside": expect(X)}
    found = bisect(plain(proto), {"x": X}, differs_from(RIGHT, 1e-3), trace)
    assert found is not None
    assert (found.value, found.cause) == ("scaled", "unknown")


def test_without_a_trace_a_wrong_graph_cannot_be_told_from_itself() -> None:
    wrong = chain(2.5)
    found = bisect(optimised(wrong), {"x": X}, differs_from(RIGHT, 1e-3), None, plain(wrong))
    assert found is not None
    assert (found.value, found.cause, found.yardstick) == ("y", "graph or kernel", "twin")
    assert found.deviation is None


class Wrong(Session):
    """A runtime that runs another graph than it is given, on ONNX Runtime."""

    def start(self, name: str, proto: onnx.ModelProto) -> None:
        self._session = ort_cpu.load(proto.SerializeToString())
        super().__init__(name, self._session.inputs)

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._session.run(inputs)

    def placement(self) -> dict[str, int]:
        return self._session.placement()

    def _close(self) -> None:
        self._session.close()


class Fusing(Wrong):
    """A runtime that computes Mul and Add as one, wrongly, unless what is between is an output."""

    def __init__(self, data: bytes) -> None:
        proto = onnx.load_model_from_string(data)
        if "scaled" not in {output.name for output in proto.graph.output}:
            proto.graph.initializer[0].CopyFrom(chain(2.5).graph.initializer[0])
        self.start("fusing", proto)


@pytest.mark.parametrize("trace", [TRACE, None])
def test_an_error_that_looking_hides_is_looked_for_one_value_at_a_time(
    trace: dict[str, exposing.Array] | None,
) -> None:
    proto = chain()
    found = bisect(
        Exposable(proto, Fusing), {"x": X}, differs_from(RIGHT, 1e-3), trace, plain(proto)
    )
    assert found is not None
    assert found.one_at_a_time
    assert found.hidden_by == "scaled"
    assert found.place is not None
    assert (found.place.node, found.cause) == ("node_scaled", "runtime")
    assert "the error is gone while 'scaled' is looked at" in found.lines()[0]


class Subtracting(Wrong):
    """A runtime whose Add is wrong, whatever is looked at."""

    def __init__(self, data: bytes) -> None:
        proto = onnx.load_model_from_string(data)
        proto.graph.node[1].op_type = "Sub"
        self.start("subtracting", proto)


@pytest.mark.parametrize("known", [("scaled", "moved", "size"), ("scaled", "size"), ()])
def test_a_runtime_that_is_wrong_on_a_right_graph_is_to_blame(known: tuple[str, ...]) -> None:
    """The twin names the node also where the trace has not its value, or there is no trace."""
    proto = chain()
    trace = {name: TRACE[name] for name in known}
    graph = Exposable(proto, Subtracting)
    found = bisect(graph, {"x": X}, differs_from(RIGHT, 1e-3), trace, plain(proto))
    assert found is not None
    assert found.place is not None
    assert (found.value, found.place.op, found.cause) == ("moved", "Add", "runtime")
    assert found.yardstick == ("pytorch" if known else "twin")
    assert found.deviation is not None
    assert found.deviation.error == 2.0


def test_a_kernel_that_is_wrong_on_a_right_graph_is_told_from_it() -> None:
    """A query whose keys all have finfo.min: every key weighs the same, and ONNX Runtime gives 0.

    Since 1.28 it takes them for blocked; softmax of equal scores is the mean of the values.
    """
    node = make_node(
        "Attention", ["x", "x", "x", "mask"], ["attended"], q_num_heads=2, kv_num_heads=2
    )
    lowest = np.full((4, 4), np.finfo(np.float32).min)
    proto = model([node, make_node("Neg", ["attended"], ["y"])], {"mask": lowest})
    proto.opset_import[0].version = 23
    mean = np.broadcast_to(X.astype(np.float64).mean(1, keepdims=True), SHAPE)
    wrong = differs_from({"y": -mean}, 1e-3)
    found = bisect(optimised(proto), {"x": X}, wrong, {"attended": expect(mean)}, plain(proto))
    assert found is not None
    assert (found.value, found.cause) == ("attended", "kernel")
    assert "a kernel of the runtime is to blame" in found.lines()[1]


def test_values_are_looked_at_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposing, "LIMIT", 10)
    sizes = {"a": 4, "b": 4, "c": 4, "d": 40, "e": 1}
    assert list(chunks(list(sizes), sizes.__getitem__)) == [["a", "b"], ["c"], ["d"], ["e"]]
    wrong = chain(2.5)
    found = bisect(optimised(wrong), {"x": X}, differs_from(RIGHT, 1e-3), TRACE, plain(wrong))
    assert found is not None
    assert (found.value, found.compared) == ("scaled", 3)


def norm(mean_of: list[onnx.NodeProto], squares: str) -> onnx.ModelProto:
    """Layer norm by hand in float16; `mean_of` stands between the squares and their mean."""
    nodes = [
        make_node("ReduceMean", ["x", "axis"], ["mean"]),
        make_node("Sub", ["x", "mean"], ["centred"]),
        make_node("Pow", ["centred", "two"], ["squares"]),
        *mean_of,
        make_node("ReduceMean", [squares, "axis"], ["variance"]),
        make_node("Sqrt", ["variance"], ["deviation"]),
        make_node("Div", ["centred", "deviation"], ["y"]),
    ]
    return model(
        nodes, {"axis": AXIS, "two": np.array(2, np.float16), "eights": np.array([1, 8, 4])}, HALF
    )


TURNED = [
    make_node("Reshape", ["squares", "eights"], ["eight_rows"]),
    make_node("Transpose", ["eight_rows"], ["turned"], perm=[0, 2, 1]),
]
SIGNS = np.sign(np.random.default_rng(0).standard_normal(SHAPE))
SIGNS[..., :4], SIGNS[..., 4:] = 1.0, -1.0  # means are 0
STREAM = (RESIDUAL * SIGNS).astype(np.float16)


def test_squares_of_a_layer_norm_that_pass_65504_are_named_with_their_magnitude() -> None:
    """Reshaping them is what stores them as float16 on this runtime."""
    proto = norm(TURNED, "turned")
    wrong = differs_from({"y": SIGNS}, 0.1)
    found = bisect(plain(proto), {"x": STREAM}, wrong, twin=plain(in_single(proto)))
    assert found is not None
    assert found.place is not None
    assert found.deviation is not None
    assert (found.value, found.place.op, found.cause) == ("squares", "Pow", "precision")
    assert found.deviation.overflows
    assert "it reaches 9e+04 and float16 ends at 65504" in found.lines()[0]


def attention(factor: float) -> onnx.ModelProto:
    """Queries and keys are `x * factor`; Attention has a float16 kernel on the CPU."""
    node = make_node("Attention", ["large", "large", "x"], ["y"], q_num_heads=2, kv_num_heads=2)
    node.metadata_props.add(key="attn_export.site", value="blocks.0.attn")
    nodes = [make_node("Mul", ["x", "factor"], ["large"]), node]
    proto = model(nodes, {"factor": np.array(factor, np.float16)}, HALF)
    proto.opset_import[0].version = 23
    return proto


@pytest.mark.parametrize(
    ("factor", "value", "site"),
    [(300.0, "large", ""), (2.0, "y", "blocks.0.attn")],  # 9e4; or scores of 600 * 600 * 4 / 2
)
def test_an_overflow_before_a_site_and_inside_of_it_are_told_apart(
    factor: float, value: str, site: str
) -> None:
    proto = attention(factor)
    wrong = differs_from({"y": RESIDUAL * SIGNS}, 1.0)
    found = bisect(optimised(proto), {"x": STREAM}, wrong, twin=plain(in_single(proto)))
    assert found is not None
    assert (found.value, found.site, found.cause) == (value, site, "precision")
    assert found.deviation is not None
    assert found.deviation.overflows is (factor == 300.0)
    assert not np.isfinite(found.deviation.got)


def test_every_value_of_a_float16_graph_is_put_next_to_float32() -> None:
    """ONNX Runtime's CPU provider keeps these squares in float32; another runtime would not."""
    proto = norm([], "squares")
    found = deviations(optimised(proto), plain(in_single(proto)), {"x": STREAM})
    assert [value.value for value in found if value.overflows] == ["squares", "variance"]
    first = next(value for value in found if value.drifts)
    assert (first.value, first.largest, first.limit) == ("squares", 9e4, 65504.0)
    wrong = differs_from({"y": SIGNS}, 0.1)
    assert bisect(optimised(proto), {"x": STREAM}, wrong) is None


def masked(lowest: float, kind: int) -> onnx.ModelProto:
    """Scores plus (1 - mask) * lowest, as many models write it; all is allowed here."""
    dtype = np.float16 if kind == HALF else np.float32
    with np.errstate(over="ignore"):
        constants = {"lowest": np.array(lowest).astype(dtype), "zeros": np.zeros(SHAPE, dtype)}
    nodes = [
        make_node("Mul", ["zeros", "lowest"], ["bias"]),
        make_node("Add", ["x", "bias"], ["scores"]),
        make_node("Softmax", ["scores"], ["y"], axis=-1),
    ]
    return model(nodes, constants, kind)


def test_a_mask_constant_beyond_float16_is_named_against_the_graph_before_conversion() -> None:
    """-1e12 becomes -inf, and 0 times that NaN."""
    half, single = masked(-1e12, HALF), masked(-1e12, 1)
    x = np.zeros(SHAPE, np.float16)
    found = deviations(plain(half), plain(single), {"x": x})
    assert [value.value for value in found if value.drifts] == ["bias", "scores", "y"]
    assert np.isnan(found[0].got)
    trace = {"bias": expect(np.zeros(SHAPE)), "scores": expect(np.zeros(SHAPE))}
    wrong = differs_from({"y": np.full(SHAPE, 0.125)}, 0.01)
    drift = bisect(optimised(half), {"x": x}, wrong, trace, plain(in_single(half)))
    assert drift is not None
    assert (drift.value, drift.cause) == ("bias", "graph")
    assert "'bias' is nan at [0, 0, 0], where 0 is right" in drift.lines()[0]


def test_a_graph_in_float16_has_a_twin_in_float32_with_the_same_names() -> None:
    proto = norm([], "squares")
    twin = in_single(proto)
    assert (is_half(proto), is_half(in_single(chain()))) == (True, False)
    assert [o.type.tensor_type.elem_type for o in twin.graph.output] == [1]
    values = plain(twin).run({"x": STREAM.astype(np.float32)}, ["squares"])
    assert values["squares"].dtype == np.float32
    np.testing.assert_allclose(values["squares"], 9e4)
    np.testing.assert_allclose(values["y"], SIGNS)
