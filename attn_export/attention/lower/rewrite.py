"""What a lowering proposes for one site, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.layout import View, identity, trace
from attn_export.attention.metadata import MODULE, ORIGIN, SITE
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site


@dataclass
class Rewrite:
    """New nodes that compute `old` from `inputs`.

    Attributes:
        inputs: values of the graph at which the rewrite begins.
        old, new: the value that is replaced, and what replaces it.
        weights: new initializers.
        mask: which of the inputs is a mask, so that it is proved on hostile ones.
    """

    lowering: str
    inputs: list[ir.Value]
    old: ir.Value
    new: ir.Value
    nodes: list[ir.Node]
    weights: list[ir.Value] = field(default_factory=list)
    mask: ir.Value | None = None


def initializer(name: str, array: NDArray[np.generic]) -> ir.Value:
    """A constant as an initializer that belongs to no graph yet."""
    tensor = ir.tensor(np.asarray(array, order="C"), name=name)
    return ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )


def tag(site: Site, node: ir.Node) -> ir.Node:
    """Name a node after its site and keep where the site came from."""
    node.name = f"{site.name}/{node.op_type}"
    node.metadata_props[SITE] = site.name
    for key in (MODULE, ORIGIN):
        if key in site.node.metadata_props:
            node.metadata_props[key] = site.node.metadata_props[key]
    return node


def require_plain(site: Site, op: str) -> None:
    """Raise NotLowerable for what neither contrib op is given yet, or does not have."""
    if site.mask != "none":
        raise NotLowerable(Reason.MASK, f"its {site.mask} mask is not given to {op}")
    if site.kv_heads != site.heads:
        raise NotLowerable(Reason.HEADS, f"{op} has no grouped heads")
    if site.softcap:
        raise NotLowerable(Reason.SOFTCAP, f"{op} has no softcap")
    if len(site.node.outputs) > 1:
        raise NotLowerable(Reason.CACHE, "it returns a cache or its weights")


def merged_output(site: Site) -> ir.Value:
    """The value in which the heads lie side by side again, (B, S, N * Hv).

    Raises:
        NotLowerable: no such value follows the site through layout nodes alone.
    """
    start = site.node.outputs[0]
    if start.shape is not None and len(start.shape) == 3:
        return start
    whole = identity(start)
    batch, heads, tokens, head = whole.axes
    wanted = View(start, (batch, tokens, heads + head), whole.offset)
    value, found = start, None
    while len(value.uses()) == 1 and not value.is_graph_output():
        ((node, _),) = value.uses()
        if len(node.outputs) != 1:
            break
        value = node.outputs[0]
        view = trace(value, start)
        if view.root is not start:
            break
        if view.same_as(wanted):
            found = value
    if found is None:
        raise NotLowerable(
            Reason.LAYOUT, "its heads are not merged into (batch, tokens, heads * head size)"
        )
    return found
