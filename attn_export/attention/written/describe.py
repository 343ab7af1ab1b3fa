"""What is known of a softmax that no op takes, so that it is listed as what it is."""

from __future__ import annotations

import math

import onnx_ir as ir

from attn_export.attention.data import one_source
from attn_export.attention.reasons import NotLowerable
from attn_export.attention.site import Mask, Site, Size
from attn_export.attention.sizes import sizes
from attn_export.attention.written.softmaxes import Softmax
from attn_export.attention.written.steps import Bias, Block, Cap, Factor, Spread, Step, Way, way
from attn_export.attention.written.weighing import weighing


def describe(found: Softmax, name: str, data: set[int]) -> Site:
    """The site as far as it can be read; a head size that cannot is 0."""
    weights = sizes(found.weights)
    rank = len(weights)
    keys, queries = found.axis, rank - 2 if found.axis == rank - 1 else rank - 1
    heads = weights[1] if rank == 4 and {keys, queries} == {2, 3} else 1
    product, steps = _way(found)
    query, key = (None, None) if product is None else product.inputs[:2]
    kind = "additive"
    if query is not None and key is not None:
        kind = "self" if one_source(query, key, data) else "cross"
    scale = math.prod(step.value for step in steps if isinstance(step, Factor))
    return Site(
        name=name,
        node=found.node,
        kind=kind,
        heads=heads if isinstance(heads, int) else 1,
        kv_heads=heads if isinstance(heads, int) else 1,
        head_size=_last(query),
        v_head_size=_value_size(found),
        query_tokens=_said(weights[queries]) if rank > 1 else 1,
        key_tokens=_said(weights[keys]),
        mask=_mask(steps),
        causal="unknown" if _mask(steps) != "none" else "none",
        scale=scale,
        softcap=next((step.cap for step in steps if isinstance(step, Cap)), 0.0),
    )


def _way(found: Softmax) -> Way | tuple[None, list[Step]]:
    try:
        return way(found.scores)
    except NotLowerable:
        return None, []


def _value_size(found: Softmax) -> int:
    try:
        weighed = weighing(found.weights)
    except NotLowerable:
        return 0
    shape = sizes(weighed.product.outputs[0])
    size = shape[-1] if weighed.position == 0 else shape[-2]
    return size if isinstance(size, int) else 0


def _last(value: ir.Value | None) -> int:
    size = value.shape[-1] if value is not None and value.shape is not None else None
    return size if isinstance(size, int) else 0


def _said(size: object) -> Size:
    return size if isinstance(size, int) else str(size)


def _mask(steps: list[Step]) -> Mask:
    if any(isinstance(step, Bias | Spread) for step in steps):
        return "additive"
    return "bool" if any(isinstance(step, Block) for step in steps) else "none"
