"""Graphs of one standard Attention node on its own inputs, and the same in float64 by numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attn_export.attention.apply import apply
from attn_export.attention.find import find
from attn_export.attention.lowering import BUILDERS
from attn_export.attention.site import Site
from attn_export.runtimes import ort_cpu

Shape = Sequence[int | str]
SIZES = [{"B": 3, "S": 3, "T": 4, "P": 2}, {"B": 1, "S": 1, "T": 5, "P": 0}]
TYPES = {"f": TensorProto.FLOAT, "b": TensorProto.BOOL, "i": TensorProto.INT64}


def model(
    inputs: Mapping[str, Shape],
    nodes: Sequence[onnx.NodeProto],
    outputs: Mapping[str, Shape],
    constants: Mapping[str, NDArray[np.generic]] | None = None,
) -> ir.Model:
    """A model with shapes inferred; an input called "keep..." or "block..." is bool."""

    def info(name: str, shape: Shape) -> onnx.ValueInfoProto:
        dtype = TensorProto.BOOL if name.startswith(("keep", "block")) else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, dtype, shape)

    weights = [onnx.numpy_helper.from_array(a, name) for name, a in (constants or {}).items()]
    graph = helper.make_graph(
        list(nodes), "g", [info(*item) for item in inputs.items()],
        [info(*item) for item in outputs.items()], weights,
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True))


def node(op: str, inputs: str, outputs: str, **attributes: object) -> onnx.NodeProto:
    """Names separated by spaces; "-" is a missing input."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(
        op, names, outputs.split(), name=f"{op.lower()}/{outputs}", **attributes
    )


def attention(
    mask: Shape | None = None, bool_mask: bool = True, heads: int = 2, kv_heads: int = 2,
    tokens: str = "T", size: int = 8, v_size: int = 8, **attributes: object,
) -> ir.Model:  # fmt: skip
    """q, k and v (B, heads, tokens, size) with or without a mask: "keep" or "bias"."""
    inputs: dict[str, Shape] = {
        "q": ("B", heads, "S", size),
        "k": ("B", kv_heads, tokens, size),
        "v": ("B", kv_heads, tokens, v_size),
    }
    name = "keep" if bool_mask else "bias"
    if mask is not None:
        inputs[name] = mask
    made = node("Attention", " ".join(inputs), "y", **attributes)
    return model(inputs, [made], {"y": ("B", heads, "S", v_size)})


def site_of(graph: ir.Model) -> Site:
    (site,) = find(graph)
    return site


def become(graph: ir.Model, op: str, sizes: Sequence[Mapping[str, int]] = SIZES) -> ir.Node:
    """Lower the one site to this op, proved, and give the fused node."""
    apply(graph, BUILDERS[op](site_of(graph)), sizes)
    RemoveUnusedNodesPass()(graph)
    (fused,) = [n for n in graph.graph if f"{n.domain or 'ai.onnx'}.{n.op_type}" == op][-1:]
    return fused


def run(graph: ir.Model, **inputs: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    names = [value.name for value in graph.graph.outputs]
    with ort_cpu.load(ir.to_proto(graph).SerializeToString(), threads=1) as session:
        results = session.run(inputs)
    return [results[str(name)] for name in names]


def truth(
    q: NDArray[np.generic], k: NDArray[np.generic], v: NDArray[np.generic],
    keep: NDArray[np.bool_] | None = None, bias: NDArray[np.generic] | None = None,
    scale: float | None = None, softcap: float = 0.0,
) -> NDArray[np.float64]:  # fmt: skip
    """softmax(softcap(scale * Q K^T) + bias) V in float64; 0 where a query may see no key."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = np.where(keep, scores, -np.inf)
    best = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(best), best, 0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ v
