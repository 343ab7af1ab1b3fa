"""Sizes of ONNX's own Attention, in the terms of ONNX Runtime's symbolic shape inference.

That inference looks at an operator's name alone and takes this one for com.microsoft.Attention, so
that it stopped at the first.
"""

from __future__ import annotations

from typing import Any

import onnx

ONNX_DOMAINS = ("", "ai.onnx")
PAST_KEY = 4


def add_rules(inference: Any) -> None:
    """Teach one `SymbolicShapeInference`."""
    contrib = inference.dispatcher_["Attention"]

    def attention(node: onnx.NodeProto) -> None:
        if node.domain in ONNX_DOMAINS:
            _attention(inference, node)
        else:
            contrib(node)

    inference.dispatcher_["Attention"] = attention


def _attention(inference: Any, node: onnx.NodeProto) -> None:
    """Y, present_key, present_value and qk_matmul_output.

    Queries, keys and values are (B, N, S, H), (B, K, T, H), (B, K, T, Hv), or without a head axis
    (B, S, N H), (B, T, K H), (B, T, K Hv). Specification: ONNX operator Attention, opset 23.
    """
    query, key, value = (inference._get_sympy_shape(node, index) for index in range(3))
    if len(query) == 4:
        batch, heads, queries, _ = query
        (_, kv_heads, keys, size), v_size = key, value[3]
        answer = [batch, heads, queries, v_size]
    else:
        numbers = {a.name: a.i for a in node.attribute}
        heads, kv_heads = numbers["q_num_heads"], numbers["kv_num_heads"]
        batch, queries, _ = query
        keys, size, v_size = key[1], key[2] // kv_heads, value[2] // kv_heads
        answer = [batch, queries, heads * v_size]
    past = inference._try_get_shape(node, PAST_KEY)
    total = keys if not past else inference._get_sympy_shape(node, PAST_KEY)[2] + keys
    shapes = [
        answer,
        [batch, kv_heads, total, size],
        [batch, kv_heads, total, v_size],
        [batch, heads, queries, total],
    ]
    dtype = inference.known_vi_[node.input[0]].type.tensor_type.elem_type
    for name, shape in zip(node.output, shapes, strict=False):
        if name:
            inference._update_computed_dims(shape)
            sizes = [int(s) if getattr(s, "is_number", True) else str(s) for s in shape]
            made = onnx.helper.make_tensor_value_info(name, dtype, sizes)
            inference.known_vi_[name].CopyFrom(made)
