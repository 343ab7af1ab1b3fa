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
        source: (B, tokens, D_in).
        weight: (D_in, heads * size), columns in the order (head, element).
        bias: (heads * size,).
    """

    source: ir.Value
    weight: NDArray[np.generic]
    bias: NDArray[np.generic]


def operands(site: Site) -> tuple[Operand, Operand, Operand]:
    """Query, key and value.

    Raises:
        NotLowerable: one of them is not a linear projection of a (B, tokens, D) value.
    """
    query, key, value = (
        _operand(site, role, index) for index, role in enumerate(("query", "key", "value"))
    )
    return query, key, value


def _operand(site: Site, role: str, index: int) -> Operand:
    value = site.node.inputs[index]
    if value is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, f"it has no {role}")
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
    heads = site.heads if role == "query" else site.kv_heads
    if len(view.axes) == 4:
        batch, head, tokens, element = range(4)
        order: tuple[int, ...] = (head, element)
    else:
        batch, tokens, element = range(3)
        order = (element,)
    columns = view.indices(order, 2)
    if not view.covers(batch, 0) or not view.covers(tokens, 1) or columns is None:
        raise NotLowerable(
            Reason.LAYOUT, f"its {role} mixes tokens or batch rows of the projection"
        )
    flat = columns.reshape(-1)
    if flat.size % heads:
        raise NotLowerable(Reason.HEADS, f"its {role} does not split into {heads} heads")
    return Operand(found.source, found.weight[:, flat], found.bias[flat])
