"""MatMul, Softmax, MatMul: the form that every runtime has, and that TensorRT fuses itself.

1. The scale stands on the query, before the first product; the mask has 4 axes and is one Add.
2. Nothing stands between the softmax and the second product, or TensorRT would not fuse them.
3. So a blocked row is finite: the bias is the most negative number where a key is blocked, and no
   more than half of it where a mask only adds. The output of a row that has no other key is 0, as
   PyTorch's is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.data import unique
from attn_export.attention.layout import constant
from attn_export.attention.lower.cache import PAST_KEY, PAST_VALUE, PRESENT_KEY, PRESENT_VALUE
from attn_export.attention.lower.mask import boundary
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.lower.site_inputs import LENGTHS, builder, operand_of
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site

NAME = "decomposed"
SCORES, SOFTMAX = 0, 3  # values of qk_matmul_output_mode; 1 and 2 changed places in ONNX 1.23
WEIGHTS = 3


def build(site: Site) -> Rewrite:
    """Products and a softmax from (B, N, S, H) or (B, S, N * H) inputs, the output in their layout.

    Query head n reads key head n // (N / K), as PyTorch's enable_gqa and ONNX's Attention do. Past
    keys and values come before the new ones, and both together are the present ones.

    Raises:
        NotLowerable: the site has lengths or a window without a mask, or lacks a shape.
    """
    query, key, value = (operand_of(site, index) for index in range(3))
    if query.dtype is None or query.shape is None or len(query.shape) not in (3, 4):
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "the dtype or rank of its query is unknown")
    if _input(site, LENGTHS) is not None or site.lengths is not None:
        raise NotLowerable(Reason.MASK, "its lengths are not decomposed")
    if site.window is not None and site.mask == "none":
        raise NotLowerable(Reason.WINDOW, "a window is not decomposed")
    sources, mask = boundary(site)
    b = _Attention(builder(site), site, query)
    packed = len(query.shape) == 3
    if packed:
        query = b.split_heads(query, site.heads, site.head_size)
        key = b.split_heads(key, site.kv_heads, site.head_size)
        value = b.split_heads(value, site.kv_heads, site.v_head_size)
    past = _input(site, PAST_KEY), _input(site, PAST_VALUE)
    key, value = b.joined(past[0], key), b.joined(past[1], value)
    bias, seen = b.bias(mask, query, key, past[0])
    new, given = b.weighed(query, key, value, bias)
    if seen is not None:
        new = b.where(seen, new, b.number(0))
    if packed:
        new = b.merge_heads(new)
    old = site.node.outputs[0]
    new.shape, new.type = old.shape, old.type
    also = [(output, made) for index, made in ((PRESENT_KEY, key), (PRESENT_VALUE, value))
            if (output := _read(site, index)) is not None]  # fmt: skip
    if (output := _read(site, WEIGHTS)) is not None:
        also.append((output, b.returned(given, seen)))
    for output, made in also:
        made.shape, made.type = output.shape, output.type
    begins = unique([*sources, *(v for v in past if v is not None)])
    return Rewrite(NAME, begins, old, new, b.nodes, b.constants, mask, also)


def _input(site: Site, index: int) -> ir.Value | None:
    return site.node.inputs[index] if len(site.node.inputs) > index else None


def _read(site: Site, index: int) -> ir.Value | None:
    """An output that something reads."""
    if len(site.node.outputs) <= index:
        return None
    value = site.node.outputs[index]
    return value if value.uses() or value.is_graph_output() else None


@dataclass
class _Attention:
    """The steps, each from values to a value."""

    builder: Builder
    site: Site
    like: ir.Value

    @property
    def nodes(self) -> list[ir.Node]:
        return self.builder.nodes

    @property
    def constants(self) -> list[ir.Value]:
        return self.builder.weights

    def op(
        self, op_type: str, *inputs: ir.Value, dtype: ir.DataType | None = None,
        **attributes: int | list[int],
    ) -> ir.Value:  # fmt: skip
        return self.builder.op(op_type, inputs, None, dtype, **attributes)

    def where(self, condition: ir.Value, then: ir.Value, otherwise: ir.Value) -> ir.Value:
        return self.op("Where", condition, then, otherwise, dtype=self.like.dtype)

    def number(self, number: float) -> ir.Value:
        return self.builder.number(number, self.like)

    def integers(self, *numbers: int) -> ir.Value:
        return self.builder.constant(np.array(numbers, dtype=np.int64))

    def split_heads(self, value: ir.Value, heads: int, size: int) -> ir.Value:
        """(B, S, N * H) as (B, N, S, H)."""
        apart = self.op("Reshape", value, self.integers(0, 0, heads, size))
        return self.op("Transpose", apart, perm=[0, 2, 1, 3])

    def merge_heads(self, value: ir.Value) -> ir.Value:
        """(B, N, S, Hv) as (B, S, N * Hv)."""
        tokens_first = self.op("Transpose", value, perm=[0, 2, 1, 3])
        width = self.site.heads * self.site.v_head_size
        return self.op("Reshape", tokens_first, self.integers(0, 0, width))

    def joined(self, past: ir.Value | None, new: ir.Value) -> ir.Value:
        return new if past is None else self.op("Concat", past, new, axis=2)

    def weighed(
        self, query: ir.Value, key: ir.Value, value: ir.Value, bias: ir.Value | None
    ) -> tuple[ir.Value, dict[int, ir.Value]]:
        """softmax(scale * Q K^T, capped, biased) V; and what ONNX's Attention may return beside."""
        site = self.site
        if site.scale != 1:
            query = self.op("Mul", query, self.number(site.scale))
        keys = self.op("Transpose", key, perm=[0, 1, 3, 2])
        raw = scores = self.op("MatMul", query, self.repeated(keys, (site.head_size, -1)))
        if site.softcap:  # before any mask
            cap = self.number(site.softcap)
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, cap)), cap)
        if bias is not None:
            scores = self.op("Add", scores, bias)
        weights = self.op("Softmax", scores, axis=-1)
        result = self.op("MatMul", weights, self.repeated(value, (-1, site.v_head_size)))
        return result, {SCORES: raw, SOFTMAX: weights}

    def returned(self, given: dict[int, ir.Value], seen: ir.Value | None) -> ir.Value:
        """The scores or weights that the node returns; weights of a blocked row are 0."""
        mode = self.site.node.attributes.get_int("qk_matmul_output_mode", 0)
        if mode not in given:
            raise NotLowerable(
                Reason.WEIGHTS_USED, "its scores are returned in a form that is not made"
            )
        if mode != SOFTMAX or seen is None:
            return given[mode]
        return self.where(seen, given[mode], self.number(0))

    def repeated(self, value: ir.Value, sizes: tuple[int, int]) -> ir.Value:
        """Each key head once for every query head that reads it; `sizes` are the last two."""
        heads, groups = self.site.heads, self.site.kv_heads
        if heads == groups:
            return value
        apart = self.op("Unsqueeze", value, self.integers(2))
        copies = self.op("Expand", apart, self.integers(1, 1, heads // groups, 1, 1))
        return self.op("Reshape", copies, self.integers(0, heads, *sizes))

    def bias(
        self, mask: ir.Value | None, query: ir.Value, key: ir.Value, past: ir.Value | None
    ) -> tuple[ir.Value | None, ir.Value | None]:
        """What is added to the scores, and which rows see a key; None where all of them do."""
        causal = bool(self.site.node.attributes.get_int("is_causal", 0))
        if mask is None and not causal:
            return None, None
        lowest, zero = self.number(self._lowest), self.number(0)
        if mask is None:  # every query sees the first key at least
            return self.where(self._causal(query, key, past), zero, lowest), None
        bias = self._additive(self._four_axes(mask), zero, lowest)
        if causal:
            bias = self.where(self._causal(query, key, past), bias, lowest)
        elif _blocks_no_row(mask):
            return bias, None
        highest = self.op("ReduceMax", bias, self.integers(-1), keepdims=1)
        return bias, self.op("Greater", highest, lowest, dtype=ir.DataType.BOOL)

    @property
    def _lowest(self) -> float:
        return float((self.like.dtype or ir.DataType.FLOAT).min)

    def _four_axes(self, mask: ir.Value) -> ir.Value:
        missing = 0 if mask.shape is None else 4 - len(mask.shape)
        return self.op("Unsqueeze", mask, self.integers(*range(missing))) if missing else mask

    def _additive(self, mask: ir.Value, zero: ir.Value, lowest: ir.Value) -> ir.Value:
        if self.site.mask == "bool":
            return self.where(mask, zero, lowest)
        blocked = self.op("IsInf", mask, dtype=ir.DataType.BOOL, detect_positive=0)
        raised = self.op("Max", mask, self.number(self._lowest / 2))
        return self.where(blocked, lowest, raised)

    def _causal(self, query: ir.Value, key: ir.Value, past: ir.Value | None) -> ir.Value:
        """(S, 1) >= (T,): query i sees the new keys 0 to i, and all of the past before them."""
        rows = self._positions(query)
        if past is not None:
            rows = self.op("Add", rows, self._tokens(past))
        column = self.op("Unsqueeze", rows, self.integers(0, 1, 3))
        keys = self._positions(key)
        return self.op("GreaterOrEqual", column, keys, dtype=ir.DataType.BOOL)

    def _positions(self, value: ir.Value) -> ir.Value:
        """0 to the number of tokens of a (B, N, tokens, H) value."""
        start, step = (self.builder.constant(np.array(n, dtype=np.int64)) for n in (0, 1))
        return self.op("Range", start, self._tokens(value), step)

    def _tokens(self, value: ir.Value) -> ir.Value:
        size = self.op("Shape", value, dtype=ir.DataType.INT64, start=2, end=3)
        return self.op("Squeeze", size)


def _blocks_no_row(mask: ir.Value) -> bool:
    """Whether it is a constant in which each query sees a key."""
    array = constant(mask)
    if array is None:
        return False
    allowed = array if array.dtype == np.bool_ else ~np.isneginf(np.asarray(array, np.float64))
    return bool(np.any(allowed, axis=-1).all())
