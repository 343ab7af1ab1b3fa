"""Why no site is lowered to SparseAttention: what ONNX Runtime's kernel asks of its caller."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

B, S, N, H, BLOCK = 2, 64, 2, 8, 16
SEEN = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]])  # blocks


def session_and_feeds() -> tuple[ort.InferenceSession, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((B, S, N * H)).astype(np.float32) for name in "qkv"}
    feeds |= {name: np.zeros((B, N, S, H), np.float32) for name in ("past_key", "past_value")}
    rows = np.concatenate([[0], np.cumsum(SEEN.sum(1))])
    feeds["rows"] = rows[None].astype(np.int32)
    feeds["columns"] = np.nonzero(SEEN)[1][None].astype(np.int32)
    feeds["total"] = np.array(S, np.int32)
    feeds["lengths"] = np.full(B, S, np.int32)
    outputs = ["y", "present_key", "present_value"]
    node = helper.make_node(
        "SparseAttention", list(feeds), outputs, domain="com.microsoft",
        num_heads=N, kv_num_heads=N, sparse_block_size=BLOCK,
    )  # fmt: skip
    types = {"f": TensorProto.FLOAT, "i": TensorProto.INT32}
    given = [
        helper.make_tensor_value_info(name, types[array.dtype.kind], array.shape)
        for name, array in feeds.items()
    ]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "sparse", given, made)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]), feeds


def truth(feeds: dict[str, np.ndarray]) -> np.ndarray:
    q, k, v = (feeds[n].reshape(B, S, N, H).transpose(0, 2, 1, 3).astype(float) for n in "qkv")
    seen = np.kron(SEEN, np.ones((BLOCK, BLOCK))) * np.tril(np.ones((S, S)))
    weights = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(H)) * seen
    y = weights @ v / weights.sum(-1, keepdims=True)
    return y.transpose(0, 2, 1, 3).reshape(B, S, N * H)


def test_a_plain_run_is_refused_since_past_and_present_must_be_one_buffer() -> None:
    session, feeds = session_and_feeds()
    with pytest.raises(Exception, match="past_key->DataRaw\\(\\) == present_key->DataRaw"):
        session.run(None, feeds)


def test_with_both_bound_to_one_buffer_it_is_right() -> None:
    session, feeds = session_and_feeds()
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in ("key", "value"):
        binding.bind_ortvalue_output(f"present_{name}", values[f"past_{name}"])
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    found = dict(zip(("present_key", "present_value", "y"), binding.get_outputs(), strict=True))
    np.testing.assert_allclose(found["y"].numpy(), truth(feeds), atol=1e-5)
