"""One transformer block in standard operators, and what is read of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import parser

from attn_export.attention.lowering import lower
from attn_export.attention.site import Account
from attn_export.onnx_files.shapes import infer
from attn_export.parity.compare import compare
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import Arrays

TOKENS, WIDTH, HEADS = 5, 8, 2
SIZES = [{"batch": 1}, {"batch": 3}, {"batch": 2}]
WEIGHTS = {
    "norm": (WIDTH,), "wq": (WIDTH, WIDTH), "wk": (WIDTH, WIDTH), "wv": (WIDTH, WIDTH),
    "proj": (WIDTH, WIDTH), "up": (WIDTH, 16), "down": (16, WIDTH),
}  # fmt: skip
BLOCK = """
    n = LayerNormalization(x, norm)
    q = MatMul(n, wq)
    {query}
    k = MatMul(n, wk)
    v = MatMul(n, wv)
    a = Attention<{attention}>(qs, k, v{mask})
    p = MatMul(a, proj)
    h = Add(x, p)
    m = LayerNormalization(h, norm)
    u = MatMul(m, up)
    g = Gelu(u)
    d = MatMul(g, down)
    y = Add(h, d)
"""


def block(
    tail: str,
    outputs: str,
    *,
    inputs: str = "",
    mask: str = "",
    causal: int = 0,
    query: str = "qs = Identity(q)",
) -> ir.Model:
    """x float (batch, 5, 8) through one block to `y`, then `tail`.

    Args:
        outputs: of the graph, as "float[batch, 8] z".
        inputs, mask: further inputs, and what stands behind `v` of the Attention node.
        query: makes `qs` of `q`.
    """
    attention = f"q_num_heads={HEADS}, kv_num_heads={HEADS}, is_causal={causal}"
    body = BLOCK.format(query=query, attention=attention, mask=mask)
    # The weights are declared as inputs for the parser, and become constants below.
    sizes = {name: ", ".join(map(str, shape)) for name, shape in WEIGHTS.items()}
    declared = ", ".join(f"float[{size}] {name}" for name, size in sizes.items())
    text = f"""<ir_version: 10, opset_import: ["": 23]>
        g (float[batch, {TOKENS}, {WIDTH}] x{inputs}, {declared}) => ({outputs}) {{
        {body} {tail} }}"""
    return parsed(text, WEIGHTS)


def parsed(text: str, weights: Mapping[str, Sequence[int]]) -> ir.Model:
    """A model of ONNX's text form, of whose inputs these shapes are drawn to be constants."""
    model = ir.from_proto(parser.parse_model(text))
    rng = np.random.default_rng(0)
    for value in [v for v in model.graph.inputs if v.name in weights]:
        array = rng.standard_normal(weights[str(value.name)]).astype(np.float32)
        value.const_value = ir.tensor(array, name=value.name)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    infer(model)
    return model


def lowered(model: ir.Model) -> tuple[ir.Model, Account]:
    """A copy for ONNX Runtime's CPU provider."""
    after = model.clone()
    return after, lower(after, ort_cpu.NAME, SIZES)


def inputs_of(model: ir.Model, batch: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    drawn: Arrays = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        shape = [size if isinstance(size, int) else batch for size in value.shape]
        if value.dtype == ir.DataType.BOOL:
            allowed = rng.random(shape) > 0.4
            allowed[0, ..., 0, :] = False  # a query that may see no key
            drawn[str(value.name)] = allowed
        else:
            drawn[str(value.name)] = rng.standard_normal(shape).astype(np.float32)
    return drawn


def run(model: ir.Model, inputs: Arrays, *, optimize: bool = True) -> Arrays:
    with ort_cpu.load(ir.to_proto(model).SerializeToString(), 1, optimize=optimize) as session:
        return session.run(inputs)


def assert_equal(before: ir.Model, after: ir.Model) -> None:
    """At batch 1, 2 and 3, with optimisations off for the first."""
    for batch in (1, 2, 3):
        inputs = inputs_of(before, batch, batch)
        expected, found = run(before, inputs, optimize=False), run(after, inputs)
        assert list(found) == list(expected)
        for name, array in expected.items():
            (result,) = compare(name, found[name], array, {"all": 1e-5 * _size(array)}, None)
            assert result.passed, result.problem


def _size(array: NDArray[np.generic]) -> float:
    return max(1.0, float(np.abs(np.asarray(array, np.float64)).max()))
