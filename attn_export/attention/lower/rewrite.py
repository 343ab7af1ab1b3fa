"""What a lowering proposes for one site, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.metadata import SITE, origin_of
from attn_export.attention.site import Site


@dataclass
class Rewrite:
    """New nodes that compute `old` from `inputs`.

    Attributes:
        inputs: values of the graph at which the rewrite begins.
        old, new: the value that is replaced, and what replaces it.
        also: further such pairs, as the present keys and values of a cache.
        weights: new initializers.
        mask: which of the inputs is a mask; if it may block, it is proved on hostile ones.
    """

    lowering: str
    inputs: list[ir.Value]
    old: ir.Value
    new: ir.Value
    nodes: list[ir.Node]
    weights: list[ir.Value] = field(default_factory=list)
    mask: ir.Value | None = None
    also: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[ir.Value, ir.Value]]:
        """Each replaced value with what replaces it, the attention's own output first."""
        return [(self.old, self.new), *self.also]


def outputs_of(old: ir.Node, new: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """The outputs of a node, each with that of its like that replaces it; some may be left out."""
    pairs = list(zip(old.outputs, new.outputs, strict=True))
    for before, after in pairs:
        if before.name == "":
            after.name = ""
    return [pair for pair in pairs if pair[0].name != ""]


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
    node.metadata_props.update(origin_of(site.node))
    return node
