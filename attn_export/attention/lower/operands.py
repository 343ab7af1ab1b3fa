"""Query, key and value of a site as columns of linear projections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.layout import trace
from attn_export.attention.projection import projection
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site


@dataclass(frozen=True)
class Operand:
    """`source` @ `weight` + `bias`, heads side by side.

    Attributes:
        source: (B, tokens, D_in), or (tokens, B, D_in) where `sequence_first`.
        weight: (D_in, heads * size), columns in the order (head, element).
        bias: (heads * size,).
    """

    source: ir.Value
    weight: NDArray[np.generic]
    bias: NDArray[np.generic]
    sequence_first: bool = False


def operands(site: Site) -> tuple[Operand, Operand, Operand]:
    """Query, key and value.

    Raises:
        NotLowerable: one of them is not a linear projection of a (B, tokens, D) value.
    """
    query, key, value = site.node.inputs[:3]
    if query is None or key is None or value is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "it lacks an input")
    return (
        operand(query, "query", site.heads),
        operand(key, "key", site.kv_heads),
        operand(value, "value", site.kv_heads),
    )


def operand(value: ir.Value, role: str, heads: int) -> Operand:
    """One of them, (B, heads, tokens, size) or (B, tokens, heads * size).

    Raises:
        NotLowerable: as `operands`.
    """
    view = trace(value)
    found = projection(view.root)
    if found is None:
        raise NotLowerable(
            Reason.PROJECTION, f"its {role} is not a linear projection with constant weights"
        )
    if len(view.offset) != 3:
        raise NotLowerable(
            Reason.PROJECTION,
            f"its {role} is projected from a value that is not (batch, tokens, D)",
        )
    batch, tokens = (0, 2) if len(view.axes) == 4 else (0, 1)
    columns = view.indices((1, 3) if len(view.axes) == 4 else (2,), 2)
    straight = view.covers(batch, 0) and view.covers(tokens, 1)
    turned = view.covers(batch, 1) and view.covers(tokens, 0)
    if columns is None or not (straight or turned):
        raise NotLowerable(
            Reason.LAYOUT, f"its {role} mixes tokens or batch rows of the projection"
        )
    flat = columns.reshape(-1)
    if flat.size % heads:
        raise NotLowerable(Reason.HEADS, f"its {role} does not split into {heads} heads")
    return Operand(found.source, found.weight[:, flat], found.bias[flat], not straight)
