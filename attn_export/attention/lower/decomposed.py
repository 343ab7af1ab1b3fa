"""MatMul, Softmax, MatMul: the form that every runtime has, and that TensorRT fuses itself."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.lower.mask import boundary
from attn_export.attention.lower.rewrite import Rewrite, initializer, tag
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site

NAME = "decomposed"


class _Builder:
    """Collects the nodes and constants of one site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []

    def op(
        self, op_type: str, *inputs: ir.Value, name: str, **attributes: int | list[int]
    ) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes=attributes or None)
        tag(self.site, node).name = f"{self.site.name}/{name}"
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        value = initializer(f"{self.site.name}/{name}.constant", array)
        self.weights.append(value)
        return value


def build(site: Site) -> Rewrite:
    """Scale the query before the first MatMul, mask, normalise, weigh; blocked rows become 0.

    Raises:
        NotLowerable: the site has 3-D inputs, grouped heads, a cache or a causal mask.
    """
    query, key, value = site.node.inputs[:3]
    if query is None or key is None or value is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "it lacks an input")
    if query.shape is None or len(query.shape) != 4:
        raise NotLowerable(Reason.LAYOUT, "its inputs are not (batch, heads, tokens, head size)")
    if site.heads != site.kv_heads:
        raise NotLowerable(Reason.HEADS, "grouped heads are not decomposed")
    if site.causal != "none":
        raise NotLowerable(Reason.CAUSAL, "a causal flag is not decomposed")
    if len(site.node.outputs) > 1:
        raise NotLowerable(Reason.CACHE, "it returns a cache or its weights")
    dtype = query.dtype
    if dtype is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "its dtype is unknown")
    b = _Builder(site)
    mask = site.node.inputs[3] if len(site.node.inputs) > 3 else None
    scale = b.constant("scale", np.array(site.scale, dtype=dtype.numpy()))
    keys = b.op("Transpose", key, name="key_transposed", perm=[0, 1, 3, 2])
    scores = b.op("MatMul", b.op("Mul", query, scale, name="scaled"), keys, name="scores")
    if site.softcap:
        cap = b.constant("softcap", np.array(site.softcap, dtype=dtype.numpy()))
        capped = b.op("Tanh", b.op("Div", scores, cap, name="softcap/div"), name="softcap/tanh")
        scores = b.op("Mul", capped, cap, name="softcap")
    if mask is not None:
        if site.mask == "bool":
            zero = b.constant("zero", np.array(0, dtype=dtype.numpy()))
            blocked = b.constant("blocked", np.array(-np.inf, dtype=dtype.numpy()))
            mask = b.op("Where", mask, zero, blocked, name="mask_bias")
        scores = b.op("Add", scores, mask, name="masked")
    weights = b.op("Softmax", scores, name="weights", axis=-1)
    if mask is not None:  # softmax of a blocked row is NaN; PyTorch's attention gives 0
        zero = b.constant("blocked_row", np.array(0, dtype=dtype.numpy()))
        lost = b.op("IsNaN", weights, name="blocked")
        weights = b.op("Where", lost, zero, weights, name="unblocked")
    new = b.op("MatMul", weights, value, name="weighted")
    old = site.node.outputs[0]
    new.shape, new.type = old.shape, old.type
    sources, given = boundary(site)
    return Rewrite(NAME, sources, old, new, b.nodes, b.weights, given)
