"""Symbolic sizes of ONNX's own Attention, and of what is behind it."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import sympy
from onnx import parser

from attn_export.onnx_files.shapes import infer

HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]> g '
ROWS = "q_num_heads = 4, kv_num_heads = 2"
CASES = {
    "with a head axis": (
        "float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,16] v",
        "y = Attention(q, k, v)",
        {"y": "B 4 S 16"},
    ),
    "without one": (
        "float[B,S,32] q, float[B,T,16] k, float[B,T,24] v",
        f"y = Attention<{ROWS}>(q, k, v)",
        {"y": "B S 48"},
    ),
    "with a mask and what went before": (
        "float[B,S,32] q, float[B,T,16] k, float[B,T,24] v, float[S,M] m,"
        " float[B,2,P,8] pk, float[B,2,P,12] pv",
        f"y, k2, v2, w = Attention<{ROWS}>(q, k, v, m, pk, pv)",
        {"y": "B S 48", "k2": "B 2 P+T 8", "v2": "B 2 P+T 12", "w": "B 4 S P+T"},
    ),
    "and the com.microsoft op of that name": (
        "float[B,S,32] q, float[32,96] k, float[96] v",
        "y = com.microsoft.Attention<num_heads = 4>(q, k, v)",
        {"y": "B S 32"},
    ),
}


def sizes_of(text: str) -> dict[str, list[sympy.Expr]]:
    model = ir.from_proto(parser.parse_model(text))
    assert infer(model) == ""
    return {
        str(value.name): [sympy.sympify(str(size)) for size in value.shape or ()]
        for node in model.graph
        for value in node.outputs
    }


@pytest.mark.parametrize(("inputs", "call", "expected"), CASES.values(), ids=CASES.keys())
def test_sizes_are_those_of_the_specification(
    inputs: str, call: str, expected: dict[str, str]
) -> None:
    outputs = ", ".join(f"float[{','.join('?' * len(s.split()))}] {n}" for n, s in expected.items())
    found = sizes_of(f"{HEADER}({inputs}) => ({outputs}) {{ {call} }}")
    for name, sizes in expected.items():
        assert found[name] == [sympy.sympify(size) for size in sizes.split()], name


def test_sizes_behind_a_fused_op_of_windows_are_known() -> None:
    """64 windows of each image are rows of the first op, images again, and rows of the second."""
    found = sizes_of(
        HEADER + "(float[images,64,49,96] x) => (float[?,?,?,?] y)"
        """
        <int64[4] rows = {-1, 3, 49, 32}, int64[4] images = {-1, 64, 49, 96}> {
            a = Reshape(x, rows)
            b = Attention(a, a, a)
            c = Reshape(b, images)
            d = Reshape(c, rows)
            y = Attention(d, d, d)
        }"""
    )
    images = sympy.Symbol("images")
    assert found["c"] == [images, 64, 49, 96]
    assert found["d"] == found["y"] == [64 * images, 3, 49, 32]
