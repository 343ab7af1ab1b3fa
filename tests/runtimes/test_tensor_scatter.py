"""Why the standard ops do not keep caches in place on the CPU: Attention-24 reads the whole buffer.

TensorScatter writes into a shared buffer as it should. Attention with `nonpad_kv_seqlen` blocks the
positions behind a row's length by their scores, and still multiplies their values by zero: NaN
there reaches the answer, and a step takes as long as the capacity is. Seen with onnxruntime 1.31.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper

from attn_export.runtimes.ort import import_onnxruntime

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
make = helper.make_tensor_value_info


def session(node: NodeProto, inputs: list[Any], shape: list[str | int]) -> ort.InferenceSession:
    graph = helper.make_graph([node], "one", inputs, [make(node.output[0], FLOAT, shape)])
    opset = [helper.make_opsetid("", 24)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    options = import_onnxruntime().SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def test_tensor_scatter_writes_into_a_shared_buffer() -> None:
    node = helper.make_node("TensorScatter", ["past", "new", "at"], ["present"], axis=2)
    cache = ["B", 1, "C", 2]
    scatter = session(
        node,
        [
            make("past", FLOAT, cache),
            make("new", FLOAT, ["B", 1, "S", 2]),
            make("at", INT64, ["B"]),
        ],
        cache,
    )
    past = np.zeros((2, 1, 4, 2), np.float32)
    shared, binding = ort.OrtValue.ortvalue_from_numpy(past), scatter.io_binding()
    binding.bind_ortvalue_input("past", shared)
    binding.bind_ortvalue_output("present", shared)
    binding.bind_cpu_input("new", np.ones((2, 1, 1, 2), np.float32))
    binding.bind_cpu_input("at", np.array([1, 3]))
    scatter.run_with_iobinding(binding)
    assert past[:, 0, :, 0].tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize(("garbage", "reaches"), [(1e4, False), (float("nan"), True)])
def test_nan_behind_the_length_reaches_the_standard_op(garbage: float, reaches: bool) -> None:
    """Q = K = 0 and values 0, 1, 2, .. of which rows have 2 and 3: means 0.5 and 1."""
    node = helper.make_node("Attention", ["q", "k", "v", "", "", "", "lengths"], ["y"])
    shape = ["B", 1, "T", 8]
    attention = session(
        node,
        [make("q", FLOAT, ["B", 1, "S", 8]), make("k", FLOAT, shape), make("v", FLOAT, shape),
         make("lengths", INT64, ["B"])],
        ["B", 1, "S", 8],
    )  # fmt: skip
    index = np.arange(5, dtype=np.float32)[None, None, :, None]
    values = np.broadcast_to(index, (2, 1, 5, 8)).copy()
    values[0, :, 2:], values[1, :, 3:] = garbage, garbage
    zero = np.zeros((2, 1, 1, 8), np.float32)
    given = {"q": zero, "k": np.zeros_like(values), "v": values, "lengths": np.array([2, 3])}
    (y,) = attention.run(None, given)
    if reaches:
        assert np.isnan(y).all()
    else:
        assert y[:, 0, 0, 0].tolist() == pytest.approx([0.5, 1.0])
