"""com.microsoft Attention: projections and attention of a self-attention site in one node."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.attention.lower.operands import operands
from attn_export.attention.lower.rewrite import (
    Rewrite,
    initializer,
    merged_output,
    require_plain,
    tag,
)
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site

NAME = "com.microsoft.Attention"


def build(site: Site) -> Rewrite:
    """Query, key and value weights merged into one (D, 2 * N * H + N * Hv) matrix, and the node.

    The bias is always given, zeros where the model has none: the CPU kernel reads it unchecked.
    Specification: ONNX Runtime contrib operators, com.microsoft.Attention.

    Raises:
        NotLowerable: the site is not expressible by this op.
    """
    require_plain(site, "com.microsoft Attention")
    query, key, value = operands(site)
    if not query.source is key.source is value.source:
        raise NotLowerable(
            Reason.PROJECTION, "its query, key and value are projected from different values"
        )
    old = merged_output(site)
    weight = initializer(
        f"{site.name}/qkv.weight", np.concatenate([query.weight, key.weight, value.weight], axis=1)
    )
    bias = initializer(f"{site.name}/qkv.bias", np.concatenate([query.bias, key.bias, value.bias]))
    node = ir.node(
        "Attention",
        [query.source, weight, bias],
        attributes={
            "num_heads": site.heads,
            "qkv_hidden_sizes": [part.weight.shape[1] for part in (query, key, value)],
            "scale": site.scale,
            "unidirectional": int(site.causal == "upper-left"),
        },
        domain="com.microsoft",
    )
    new = tag(site, node).outputs[0]
    new.shape, new.type = old.shape, old.type
    return Rewrite(NAME, [query.source], old, new, [node], [weight, bias])
