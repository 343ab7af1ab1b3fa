"""A linear projection with constant weights: what queries, keys and values usually come from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.layout import constant, trace
from attn_export.attention.sizes import sizes


@dataclass(frozen=True)
class Projection:
    """`output` = source @ weight + bias, over the last axis of `source`.

    Attributes:
        weight: (D_in, D_out).
        bias: (D_out,), zeros where there is none.
    """

    source: ir.Value
    weight: NDArray[np.generic]
    bias: NDArray[np.generic]


def projection(output: ir.Value) -> Projection | None:
    """The projection that ends in `output`, None where it is something else."""
    node = output.producer()
    if node is None:
        return None
    if node.op_type == "Gemm":
        return _gemm(node)
    if node.op_type == "MatMul":
        return _matmul(node, None)
    if node.op_type != "Add":
        return None
    for index in (0, 1):
        product, bias = node.inputs[index], folded(node.inputs[1 - index])
        inner = product.producer() if product is not None else None
        if inner is not None and inner.op_type == "MatMul" and bias is not None:
            return _matmul(inner, bias)
    return None


def folded(value: ir.Value | None) -> NDArray[np.generic] | None:
    """The array of a constant, or of what layout nodes take from one; it shares its memory."""
    if value is None or (found := constant(value)) is not None:
        return found if value is not None else None
    try:
        view = trace(value)
        shape = [int(size) for size in sizes(value)]
    except (TypeError, ValueError):
        return None
    whole = constant(view.root)
    if whole is None:
        return None
    start = whole[tuple(slice(first, None) for first in view.offset)]
    row = [atom for axis in view.axes for atom in axis]
    steps = [atom.stride * whole.strides[atom.axis] for atom in row]
    apart = np.lib.stride_tricks.as_strided(start, [int(a.size) for a in row], steps)
    return apart.reshape(shape)


def _matmul(node: ir.Node, bias: NDArray[np.generic] | None) -> Projection | None:
    source, weight = node.inputs[0], folded(node.inputs[1])
    if source is None or weight is None or weight.ndim != 2:
        return None
    width = weight.shape[1]
    if bias is None:
        bias = np.zeros(width, dtype=weight.dtype)
    if bias.size not in (1, width) or bias.shape[-1:] not in ((width,), (1,), ()):
        return None
    return Projection(source, weight, np.broadcast_to(bias.reshape(-1), (width,)))


def _gemm(node: ir.Node) -> Projection | None:
    source, weight = node.inputs[0], folded(node.inputs[1])
    if source is None or weight is None or node.attributes.get_int("transA", 0) != 0:
        return None
    if node.attributes.get_float("alpha", 1.0) != 1 or node.attributes.get_float("beta", 1.0) != 1:
        return None
    if node.attributes.get_int("transB", 0):
        weight = weight.T
    bias = folded(node.inputs[2]) if len(node.inputs) > 2 else np.zeros(1, weight.dtype)
    if bias is None or bias.size not in (1, weight.shape[1]):
        return None
    return Projection(source, weight, np.broadcast_to(bias.reshape(-1), (weight.shape[1],)))
