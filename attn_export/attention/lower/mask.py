"""A mask as ONNX Runtime's Attention kernels take it, with the same meaning.

1. ONNX's Attention broadcasts any mask; the kernels broadcast the batch and head axes alone and
   refuse the rest when they run. A smaller mask is expanded to (..., S, T).
2. Since 1.28 the CPU kernel takes a row of the most negative number for one that allows no key and
   gives 0, where PyTorch gives the mean of the values. Half that number blocks as well and keeps
   the mean. Rows of -inf give 0 in both and stay. A mask without such numbers needs none of this.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.attention.data import is_computed, unique
from attn_export.attention.layout import constant
from attn_export.attention.lower.rewrite import initializer
from attn_export.attention.masks import lowest, mask_sources, may_hold_lowest
from attn_export.attention.metadata import SITE
from attn_export.attention.site import Site
from attn_export.attention.sizes import plain, sizes

FILLED = "/mask/filled"


def kernel_mask(
    site: str, mask: ir.Value, query: ir.Value, key: ir.Value, past: ir.Value | None = None
) -> tuple[ir.Value, list[ir.Node], list[ir.Value]]:
    """The mask that the node reads, and the nodes and constants that make it.

    Args:
        past: past keys (B, K, P, H), which the mask covers before the new ones.
    """
    nodes: list[ir.Node] = []
    weights: list[ir.Value] = []

    def op(name: str, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes=attributes or None)
        node.name = f"{site}/mask/{name}"
        node.metadata_props[SITE] = site
        nodes.append(node)
        return node.outputs[0]

    result = mask
    if mask.dtype != ir.DataType.BOOL and may_hold_lowest(mask) and not _is_filled(mask):
        dtype = mask.dtype.numpy() if mask.dtype is not None else np.dtype(np.float32)
        half = np.array(lowest(mask) / 2, dtype=dtype)
        filler = initializer(f"{site}/mask.filler", half)
        weights.append(filler)
        blocked = op("blocked", "IsInf", mask, detect_positive=0)
        raised = op("raised", "Max", mask, filler)
        for value in (blocked, raised):
            value.shape = mask.shape
        result = op("filled", "Where", blocked, mask, raised)
        result.shape, result.type = mask.shape, mask.type
        raised.type = mask.type
        blocked.dtype = ir.DataType.BOOL
    if not _is_full(mask, query, key, past):
        ones = initializer(f"{site}/mask.ones", np.ones(2, dtype=np.int64))
        weights.append(ones)
        parts = [ones]
        for role, value in (("query", query), ("key", key)):
            axis = (3 if value.shape is None else len(value.shape)) - 2
            parts.append(op(f"{role}_tokens", "Shape", value, start=axis, end=axis + 1))
        if past is not None:
            parts[-1] = op("tokens", "Add", op("past", "Shape", past, start=2, end=3), parts[-1])
        # Expand broadcasts both ways, so the batch and head axes keep their sizes.
        result = op("expanded", "Expand", result, op("shape", "Concat", *parts, axis=0))
        result.type = mask.type
        if mask.shape is not None and query.shape is not None and key.shape is not None:
            lead = [1] * (4 - len(mask.shape)) + list(mask.shape)
            tokens = key.shape[-2] if past is None else None
            result.shape = ir.Shape([*lead[:2], query.shape[-2], tokens])
    return result, nodes, weights


def boundary(site: Site) -> tuple[list[ir.Value], ir.Value | None]:
    """Where the site's cut-out begins, and the mask as it was before `kernel_mask`."""
    given = list(site.node.inputs)
    mask = as_given(given[3]) if len(given) > 3 and given[3] is not None else None
    cut = mask_sources(mask) if mask is not None else []
    operands = [v for v in given[:3] if v is not None and is_computed(v)]
    return unique([*operands, *cut]), mask


def as_given(mask: ir.Value) -> ir.Value:
    node = mask.producer()
    ours = node is not None and str(node.name).endswith(("/mask/expanded", FILLED))
    if node is None or not ours:
        return mask
    source = node.inputs[0 if node.op_type == "Expand" else 1]
    return mask if source is None else as_given(source)


def _is_filled(mask: ir.Value) -> bool:
    """Whether this was done before, or the mask is a constant in which it changes nothing."""
    node = mask.producer()
    while node is not None and node.op_type == "Expand" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is not None and str(node.name).endswith(FILLED):
        return True
    array = constant(mask)
    if array is None:
        return False
    numbers = np.asarray(array, np.float64)
    half = float(np.finfo(np.float32).min) / 2
    return bool(((numbers > half) | np.isneginf(numbers)).all())


def _is_full(mask: ir.Value, query: ir.Value, key: ir.Value, past: ir.Value | None) -> bool:
    if any(value.shape is None or len(value.shape) < 2 for value in (mask, query, key)):
        return False
    tokens = sizes(key)[-2] if past is None else plain(sizes(key)[-2] + sizes(past)[-2])
    return sizes(mask)[-2:] == (sizes(query)[-2], tokens)
