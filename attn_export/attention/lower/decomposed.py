"""MatMul, Softmax, MatMul: the form that every runtime has, and that TensorRT fuses itself.

1. The scale stands on the query, before the first product; the mask has 4 axes and is one Add.
2. Nothing stands between the softmax and the second product, or TensorRT would not fuse them.
3. So a blocked row is finite: the bias is the most negative number where a key is blocked, and no
   more than half of it where a mask only adds. The output of a row that has no other key is 0, as
   PyTorch's is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.layout import constant
from attn_export.attention.lower.mask import boundary
from attn_export.attention.lower.rewrite import Rewrite, initializer, tag
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site

NAME = "decomposed"


def build(site: Site) -> Rewrite:
    """Products and a softmax from (B, N, S, H) or (B, S, N * H) inputs, the output in their layout.

    Query head n reads key head n // (N / K), as PyTorch's enable_gqa and ONNX's Attention do.

    Raises:
        NotLowerable: the site has a cache, returns its weights, or lacks a shape.
    """
    query, key, value = site.node.inputs[:3]
    if query is None or key is None or value is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "it lacks an input")
    if query.dtype is None or query.shape is None or len(query.shape) not in (3, 4):
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "the dtype or rank of its query is unknown")
    if len(site.node.outputs) > 1 or any(site.node.inputs[4:]):
        raise NotLowerable(Reason.CACHE, "it returns a cache or its weights")
    sources, mask = boundary(site)
    b = _Builder(site, query.dtype.numpy())
    packed = len(query.shape) == 3
    if packed:
        query = b.split_heads(query, site.heads, site.head_size, "query")
        key = b.split_heads(key, site.kv_heads, site.head_size, "key")
        value = b.split_heads(value, site.kv_heads, site.v_head_size, "value")
    bias, seen = b.bias(mask, query, key)
    keys = b.repeated(b.op("Transpose", key, name="key_transposed", perm=[0, 1, 3, 2]), 2)
    scores = b.capped(b.op("MatMul", b.scaled(query), keys, name="scores"))
    if bias is not None:
        scores = b.op("Add", scores, bias, name="masked")
    weights = b.op("Softmax", scores, name="weights", axis=-1)
    new = b.op("MatMul", weights, b.repeated(value, 3), name="weighted")
    if seen is not None:
        new = b.op("Where", seen, new, b.number("zero", 0), name="unblocked")
    if packed:
        new = b.merge_heads(new)
    old = site.node.outputs[0]
    new.shape, new.type = old.shape, old.type
    return Rewrite(NAME, sources, old, new, b.nodes, b.weights, mask)


class _Builder:
    """Collects the nodes and constants of one site."""

    def __init__(self, site: Site, dtype: np.dtype[Any]) -> None:
        self.site = site
        self.dtype = dtype
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
        known = next((weight for weight in self.weights if weight.name == value.name), None)
        if known is None:
            self.weights.append(value)
        return known or value

    def number(self, name: str, number: float) -> ir.Value:
        return self.constant(name, np.array(number, dtype=self.dtype))

    def integers(self, name: str, *numbers: int) -> ir.Value:
        return self.constant(name, np.array(numbers, dtype=np.int64))

    def split_heads(self, value: ir.Value, heads: int, size: int, role: str) -> ir.Value:
        """(B, S, N * H) as (B, N, S, H)."""
        shape = self.integers(f"{role}_heads", 0, 0, heads, size)
        apart = self.op("Reshape", value, shape, name=f"{role}/split")
        return self.op("Transpose", apart, name=f"{role}/heads_first", perm=[0, 2, 1, 3])

    def merge_heads(self, value: ir.Value) -> ir.Value:
        """(B, N, S, Hv) as (B, S, N * Hv)."""
        tokens_first = self.op("Transpose", value, name="tokens_first", perm=[0, 2, 1, 3])
        shape = self.integers("merged", 0, 0, self.site.heads * self.site.v_head_size)
        return self.op("Reshape", tokens_first, shape, name="merged")

    def repeated(self, value: ir.Value, tokens_axis: int) -> ir.Value:
        """Each key head for all the query heads that read it; `tokens_axis` has the keys."""
        heads, groups = self.site.heads, self.site.kv_heads
        if heads == groups:
            return value
        role, size = "value", self.site.v_head_size
        shape = [0, heads, -1, size]
        if tokens_axis == 2:
            role, shape = "key", [0, heads, self.site.head_size, -1]
        apart = self.op("Unsqueeze", value, self.integers("group_axis", 2), name=f"{role}/group")
        factors = self.integers("group", 1, 1, heads // groups, 1, 1)
        copies = self.op("Expand", apart, factors, name=f"{role}/copies")
        return self.op(
            "Reshape", copies, self.integers(f"{role}_repeated", *shape), name=f"{role}/repeated"
        )

    def scaled(self, query: ir.Value) -> ir.Value:
        if self.site.scale == 1:
            return query
        return self.op("Mul", query, self.number("scale", self.site.scale), name="scaled")

    def capped(self, scores: ir.Value) -> ir.Value:
        """softcap * tanh(scores / softcap), before any mask (ONNX Attention since 1.27)."""
        if not self.site.softcap:
            return scores
        cap = self.number("softcap", self.site.softcap)
        ratio = self.op("Div", scores, cap, name="softcap/ratio")
        return self.op("Mul", self.op("Tanh", ratio, name="softcap/tanh"), cap, name="softcap")

    def bias(
        self, mask: ir.Value | None, query: ir.Value, key: ir.Value
    ) -> tuple[ir.Value | None, ir.Value | None]:
        """What is added to the scores, and which rows see a key; None where all of them do."""
        causal = bool(self.site.node.attributes.get_int("is_causal", 0))
        if mask is None and not causal:
            return None, None
        lowest = self.number("lowest", float(ir.DataType.from_numpy(self.dtype).min))
        zero = self.number("zero", 0)
        if mask is None:  # every query sees the first key at least
            return self.op("Where", self._causal(query, key), zero, lowest, name="bias"), None
        bias = self._additive(self._four_axes(mask), zero, lowest)
        if causal:
            bias = self.op("Where", self._causal(query, key), bias, lowest, name="causal/bias")
        elif _blocks_no_row(mask):
            return bias, None
        highest = self.op("ReduceMax", bias, self.integers("last", -1), name="row", keepdims=1)
        return bias, self.op("Greater", highest, lowest, name="seen")

    def _four_axes(self, mask: ir.Value) -> ir.Value:
        missing = 0 if mask.shape is None else 4 - len(mask.shape)
        if not missing:
            return mask
        axes = self.integers("mask_axes", *range(missing))
        apart = self.op("Unsqueeze", mask, axes, name="mask/axes")
        apart.type = mask.type
        return apart

    def _additive(self, mask: ir.Value, zero: ir.Value, lowest: ir.Value) -> ir.Value:
        if self.site.mask == "bool":
            return self.op("Where", mask, zero, lowest, name="mask/bias")
        half = self.number("half_lowest", float(ir.DataType.from_numpy(self.dtype).min) / 2)
        blocked = self.op("IsInf", mask, name="mask/blocked", detect_positive=0)
        raised = self.op("Max", mask, half, name="mask/raised")
        return self.op("Where", blocked, lowest, raised, name="mask/bias")

    def _causal(self, query: ir.Value, key: ir.Value) -> ir.Value:
        """(S, 1) >= (T,), upper-left: query i sees the keys 0 to i."""
        rows = self._positions(query, "query")
        column = self.op("Unsqueeze", rows, self.integers("columns", 0, 1, 3), name="causal/rows")
        return self.op("GreaterOrEqual", column, self._positions(key, "key"), name="causal")

    def _positions(self, value: ir.Value, role: str) -> ir.Value:
        """0 to the number of tokens of a (B, N, tokens, H) value."""
        size = self.op("Shape", value, name=f"causal/{role}/size", start=2, end=3)
        count = self.op("Squeeze", size, name=f"causal/{role}/tokens")
        start, step = (self.constant(f"int_{n}", np.array(n, dtype=np.int64)) for n in (0, 1))
        return self.op("Range", start, count, step, name=f"causal/{role}/positions")


def _blocks_no_row(mask: ir.Value) -> bool:
    """Whether it is a constant in which each query sees a key."""
    array = constant(mask)
    if array is None:
        return False
    allowed = array if array.dtype == np.bool_ else ~np.isneginf(np.asarray(array, np.float64))
    return bool(np.any(allowed, axis=-1).all())
