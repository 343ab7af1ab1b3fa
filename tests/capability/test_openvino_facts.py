"""What the table says of OpenVINO, seen to be so where it is installed.

Zero scores: a query gets the mean of the values 0, 1, 2, 3 that it may see.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from attn_export.capability import (
    GROUP_QUERY_ATTENTION,
    STANDARD_ATTENTION,
    Form,
    blocked_row,
    why_not,
)
from attn_export.errors import FileError
from attn_export.runtimes import openvino
from tests.capability.nodes import LOWEST, MICROSOFT, Array, Values, model, packed, standard

HERE = openvino.availability()
pytestmark = pytest.mark.skipif(not HERE.ok, reason="openvino is not installed")
VERSION = HERE.versions.get("openvino", "")


def run(op: str, inputs: Values, outputs: int = 1, opset: int = 23, domain: str = "",
        **attributes: Any) -> list[float]:  # fmt: skip
    return answer(model(op, inputs, outputs, opset, domain, **attributes), inputs)


def answer(serialized: bytes, inputs: Values) -> list[float]:
    with openvino.load(serialized, threads=1) as session:
        result = session.run({name: a for name, a in inputs.items() if a is not None})["y0"]
    return [float(number) for number in np.asarray(result, np.float64).ravel()]


def mha(inputs: Values, outputs: int = 1, **attributes: Any) -> list[float]:
    return run("MultiHeadAttention", inputs, outputs, domain=MICROSOFT, num_heads=1, **attributes)


@pytest.mark.parametrize(("S", "result"), [(2, [0, 0.5]), (4, [0, 0.5, 1, 1.5])])
def test_both_ops_are_causal_upper_left(S: int, result: list[float]) -> None:
    assert run("Attention", standard(S, 4), is_causal=1) == pytest.approx(result)
    assert mha(packed(S, 4), unidirectional=1) == pytest.approx(result)


def test_the_standard_op_broadcasts_a_mask_over_queries() -> None:
    mask = np.array([True, False, True, False]).reshape(1, 1, 1, 4)
    assert run("Attention", {**standard(2, 4), "mask": mask}) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(("number", "way", "expected", "answer"), [
    (False, "bool", 0.0, "zero"), (-np.inf, "-inf", 0.0, "zero"), (LOWEST, "lowest", 1.5, "mean"),
])  # fmt: skip
def test_the_standard_op_gives_what_pytorch_gives_on_blocked_rows(
    number: Any, way: Any, expected: float, answer: str
) -> None:
    mask = np.full((1, 4), number, bool if way == "bool" else np.float32)
    assert run("Attention", {**standard(1, 4), "mask": mask}) == pytest.approx([expected])
    assert blocked_row(STANDARD_ATTENTION, "openvino", VERSION, way) == answer


def test_the_window_of_opset_25_is_ignored() -> None:
    """Two keys each would be 0, 0.5, 1.5, 2.5."""
    inputs = standard(4, 4)
    result = run("Attention", inputs, opset=25, is_causal=1, left_window_size=1)
    assert result == pytest.approx([0, 0.5, 1, 1.5])
    assert why_not(STANDARD_ATTENTION, "openvino", VERSION, Form(opset=25)) is not None


def test_multi_head_attention_with_a_past_needs_no_present_outputs() -> None:
    """Past values 4 and 8, a new one 0: the mean is 4."""
    past = np.array([4, 8], np.float32).reshape(1, 1, 2, 1)
    inputs: Values = {
        **packed(1, 1), "bias": None, "padding": None, "attention_bias": None,
        "past_key": np.zeros_like(past), "past_value": past,
    }  # fmt: skip
    assert mha(inputs) == pytest.approx([4.0])
    assert mha(inputs, 3) == pytest.approx([4.0])


def test_contrib_attention_is_right() -> None:
    inputs: Values = {
        "x": np.arange(4, dtype=np.float32).reshape(1, 4, 1),
        "weights": np.array([[0, 0, 1]], np.float32),
        "bias": np.zeros(3, np.float32),
    }
    assert run("Attention", inputs, domain=MICROSOFT, num_heads=1) == pytest.approx([1.5] * 4)


def grouped(batch: int, past: int) -> Values:
    """A new token whose value is 0, after past ones whose values are 2."""
    old: Array = np.zeros((batch, 1, past, 8), np.float32)
    return {
        **packed(1, 1, 8, batch),
        "past_key": old if past else None, "past_value": old + 2 if past else None,
        "seqlens_k": np.full(batch, past, np.int32), "total": np.array(past + 1, np.int32),
    }  # fmt: skip


@pytest.mark.parametrize(("batch", "past", "fixed", "allowed"), [
    (1, 3, False, True), (1, 3, True, False), (2, 3, False, False), (1, 0, False, False),
])  # fmt: skip
def test_group_query_attention_takes_batch_1_with_a_growing_cache_alone(
    batch: int, past: int, fixed: bool, allowed: bool
) -> None:
    """Past values 2, 2, 2 and a new one 0: the mean is 1.5; a fixed past gives garbage."""
    form = Form(batch=batch, cache=past > 0, fixed_past=fixed, causal="upper-left",
                query_tokens=1, key_tokens=1)  # fmt: skip
    assert (why_not(GROUP_QUERY_ATTENTION, "openvino", VERSION, form) is None) is allowed
    inputs = grouped(batch, past)
    serialized = model("GroupQueryAttention", inputs, 3, domain=MICROSOFT, num_heads=1,
                       kv_num_heads=1)  # fmt: skip
    if not fixed:
        serialized = growing(serialized)
    try:
        right = answer(serialized, inputs)[0] == pytest.approx(1.5)
    except FileError:
        right = False
    assert right is allowed


def growing(serialized: bytes) -> bytes:
    """The same with a symbolic number of past tokens."""
    made = onnx.ModelProto.FromString(serialized)
    for value in made.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[2].dim_param = "past"
    return made.SerializeToString()
