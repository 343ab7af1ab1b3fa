"""com.microsoft Attention: projections and attention of a self-attention site in one node."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.attention.lower.bias import score_bias
from attn_export.attention.lower.cache import cache_of
from attn_export.attention.lower.contrib import (
    BLOCKS,
    finish,
    fused,
    lengths_of,
    require_equal_heads,
    require_plain,
    unidirectional,
)
from attn_export.attention.lower.operands import operands
from attn_export.attention.lower.rewrite import Rewrite, initializer
from attn_export.attention.lower.site_inputs import builder
from attn_export.attention.lower.tokens_first import batch_first, beginning
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site
from attn_export.attention.sizes import sizes

NAME = "com.microsoft.Attention"


def build(site: Site) -> Rewrite:
    """Query, key and value weights merged into one (D, 2 * N * H + N * Hv) matrix, and the node.

    The bias is always given, zeros where the model has none: the CPU kernel reads it unchecked.
    Lengths are given as they are; any other mask becomes the bias on scores, see `score_bias`.
    Specification: ONNX Runtime contrib operators, com.microsoft.Attention.

    Raises:
        NotLowerable: the site is not expressible by this op.
    """
    require_plain(site, "com.microsoft Attention")
    require_equal_heads(site, "com.microsoft Attention")
    if cache_of(site) is not None:
        raise NotLowerable(Reason.CACHE, "its cache is not given to com.microsoft Attention")
    query, key, value = operands(site)
    if not query.source is key.source is value.source:
        raise NotLowerable(
            Reason.PROJECTION, "its query, key and value are projected from different values"
        )
    causal = unidirectional(site, None)
    b = builder(site)
    source = batch_first(b, query)
    weight = initializer(
        f"{site.name}/qkv.weight", np.concatenate([query.weight, key.weight, value.weight], axis=1)
    )
    offset = initializer(
        f"{site.name}/qkv.bias", np.concatenate([query.bias, key.bias, value.bias])
    )
    b.weights += [weight, offset]
    lengths = lengths_of(site, None)
    bias = None if causal or lengths is not None else score_bias(b, site, source, [(source, 1)])
    inputs: list[ir.Value | None] = [source, weight, offset]
    if bias is not None:
        inputs += [None, None, bias.value]
    attributes: dict[str, int | float | list[int]] = {
        "num_heads": site.heads,
        "qkv_hidden_sizes": [part.weight.shape[1] for part in (query, key, value)],
        "scale": site.scale,
        "unidirectional": int(causal),
    }
    if lengths is not None:
        inputs.append(lengths)
        attributes["mask_filter_value"] = BLOCKS
    shape = (*sizes(source)[:2], value.weight.shape[1])
    node = fused(b, site, "Attention", inputs, shape, attributes)
    return finish(b, site, NAME, node, [beginning(query)], bias)
