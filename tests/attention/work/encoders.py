"""A text encoder of one block in standard operators: token ids and a mask, right padded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.lowering import lower
from attn_export.attention.padding import declare
from attn_export.attention.site import Account
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import Arrays
from tests.attention.work.graphs import parsed

VOCABULARY, LONGEST, WIDTH, HEADS = 11, 16, 8, 2
SIZES = [{"batch": 1, "tokens": 4}, {"batch": 3, "tokens": 7}, {"batch": 2, "tokens": 5}]
STATES = f"float[batch, tokens, {WIDTH}]"
WEIGHTS = {
    "table": (VOCABULARY, WIDTH), "places": (LONGEST + 1, WIDTH), "norm": (WIDTH,),
    "wq": (WIDTH, WIDTH), "wk": (WIDTH, WIDTH), "wv": (WIDTH, WIDTH), "proj": (WIDTH, WIDTH),
    "up": (WIDTH, 16), "down": (16, WIDTH), "b": (WIDTH,),
}  # fmt: skip
EMBEDDING = """
    words = Gather(table, ids)
    nought = Sub(ids, ids)
    one = Constant<value_ints = [1]>()
    each = Add(nought, one)
    axis = Constant<value_int = 1>()
    numbers = CumSum(each, axis)
    positions = Gather(places, numbers)
    x = Add(words, positions)
"""
QKV = """
    q0 = MatMul(n, wq)
    q = Add(q0, b)
    k = MatMul(n, wk)
    v = MatMul(n, wv)
"""
ATTENTION = "a = Attention<q_num_heads=2, kv_num_heads=2>(q, k, v, allowed)"
WRITTEN = """
    apart = Constant<value_ints = [0, 0, 2, 4]>()
    q3 = Reshape(q, apart)
    k3 = Reshape(k, apart)
    v3 = Reshape(v, apart)
    qt = Transpose<perm = [0, 2, 1, 3]>(q3)
    kt = Transpose<perm = [0, 2, 3, 1]>(k3)
    vt = Transpose<perm = [0, 2, 1, 3]>(v3)
    scores = MatMul(qt, kt)
    low = Constant<value_float = -1e9>()
    masked = Where(allowed, scores, low)
    weights = Softmax(masked)
    at = MatMul(weights, vt)
    a3 = Transpose<perm = [0, 2, 1, 3]>(at)
    together = Constant<value_ints = [0, 0, 8]>()
    a = Reshape(a3, together)
"""
BLOCK = """
    {masking}
    two_axes = Constant<value_ints = [1, 2]>()
    allowed = Unsqueeze(keep, two_axes)
    {embedding}
    n = LayerNormalization(x, norm)
    {qkv}
    {attention}
    p = MatMul(a, proj)
    h = Add(x, p)
    m = LayerNormalization(h, norm)
    u = MatMul(m, up)
    g = Gelu(u)
    d = MatMul(g, down)
    y = Add(h, d)
    {tail}
"""
KEEP = "keep = Cast<to = 9>(mask)"
MEAN = """
    kept = Cast<to = 1>(keep)
    last = Constant<value_ints = [-1]>()
    column = Unsqueeze(kept, last)
    counted = Mul(y, column)
    sum = ReduceSum<keepdims = 0>(counted, one)
    count = ReduceSum<keepdims = 0>(column, one)
    z = Div(sum, count)
"""


def encoder(
    tail: str,
    outputs: str,
    *,
    mask: str = "int64",
    masking: str = KEEP,
    embedding: str = EMBEDDING,
    qkv: str = QKV,
    attention: str = ATTENTION,
    inputs: str = "",
    tokens: str = "tokens",
) -> ir.Model:
    """ids and mask (batch, tokens) to states `y` (batch, tokens, 8), then `tail`."""
    body = BLOCK.format(
        masking=masking, embedding=embedding, qkv=qkv, attention=attention, tail=tail
    )
    sizes = {name: ", ".join(map(str, shape)) for name, shape in WEIGHTS.items()}
    declared = ", ".join(f"float[{size}] {name}" for name, size in sizes.items())
    text = f"""<ir_version: 10, opset_import: ["": 23]>
        g (int64[batch, {tokens}] ids, {mask}[batch, {tokens}] mask{inputs}, {declared})
        => ({outputs}) {{ {body} }}"""
    return parsed(text, WEIGHTS)


def set_weights(model: ir.Model, **arrays: NDArray[np.float64]) -> None:
    for name, array in arrays.items():
        model.graph.initializers[name].const_value = ir.tensor(array.astype(np.float32), name=name)


def lowered(model: ir.Model, *, keeps: int = 1, remove: bool = True) -> tuple[ir.Model, Account]:
    """A copy for ONNX Runtime's CPU provider, with or without its padding."""
    after = model.clone()
    declare(after, {"mask": keeps}, ["mask"] if remove else [])
    return after, lower(after, ort_cpu.NAME, SIZES)


def inputs_of(lengths: Sequence[int], tokens: int, seed: int = 0) -> Arrays:
    """Ids drawn at padding as well."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(tokens) < np.array(lengths)[:, None]).astype(np.int64)
    return {"ids": rng.integers(0, VOCABULARY, mask.shape), "mask": mask}


def run(model: ir.Model, inputs: Arrays) -> Arrays:
    with ort_cpu.load(ir.to_proto(model).SerializeToString(), 1) as session:
        return session.run(inputs)
