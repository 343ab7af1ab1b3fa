"""OpenVINO sessions, where the package is installed, and what is said where it is not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from attn_export.errors import FileError, RuntimeUnavailable
from attn_export.runtimes import openvino
from attn_export.runtimes.base import TensorSpec

HERE = openvino.availability().ok
needs_openvino = pytest.mark.skipif(not HERE, reason="openvino is not installed")


def attention() -> bytes:
    """Causal attention of q, k and v, one head of size 1, tokens dynamic."""
    q, k, v, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, tokens, 1])
        for name, tokens in zip("qkvy", "STTS", strict=True)
    )
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1)
    graph = helper.make_graph([node], "g", [q, k, v], [y])
    opset = [helper.make_opsetid("", 23)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


@needs_openvino
def test_causal_attention_of_zero_scores_gives_running_means() -> None:
    with openvino.load(attention(), threads=1) as session:
        assert [spec.dtype for spec in session.inputs] == ["float32"] * 3
        assert session.placement()["CPU"] > 0
        for tokens in (4, 2):
            zero = np.zeros((1, 1, tokens, 1), np.float32)
            values = np.arange(tokens, dtype=np.float32).reshape(1, 1, tokens, 1)
            result = session.run({"q": zero, "k": zero, "v": values})["y"]
            assert result.ravel().tolist() == pytest.approx([0, 0.5, 1, 1.5][:tokens])


@needs_openvino
def test_a_fixed_size_is_a_number_and_a_dynamic_one_has_a_name() -> None:
    with openvino.load(attention(), threads=1) as session:
        assert session.inputs[0] == TensorSpec("q", "float32", (1, 1, "?q2", 1))


@needs_openvino
def test_a_file_that_is_no_model_is_a_file_error() -> None:
    with pytest.raises(FileError, match="OpenVINO refuses the model"):
        openvino.load(onnx.ModelProto().SerializeToString() + b"no model")


@pytest.mark.skipif(HERE, reason="openvino is installed")
def test_without_the_package_one_sentence_says_how_to_get_it() -> None:
    with pytest.raises(RuntimeUnavailable) as told:
        openvino.load(attention())
    assert str(told.value) == (
        "openvino is not available because openvino is not installed;"
        " run `pip install 'attn-export[openvino]'`."
    )
