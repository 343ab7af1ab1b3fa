"""Make each softmax attention one standard Attention node, proved before it is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attn_export.attention.apply import apply, drop_unused_initializers
from attn_export.attention.einsum import products_for_einsums
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.written.rewrite import rewrite
from attn_export.attention.written.softmaxes import Softmax, softmax


@dataclass
class Canonicalised:
    """What `canonicalise` did, by the names of the nodes that end a softmax."""

    replaced: set[str] = field(default_factory=set)
    refused: dict[str, NotLowerable] = field(default_factory=dict)


def canonicalise(
    model: ir.Model, wanted: Sequence[str], sizes: Sequence[Mapping[str, int]]
) -> Canonicalised:
    """Replace hand-written attention by standard Attention nodes, in every graph of the model.

    Args:
        wanted: names of the nodes that end a softmax which weighs values.
        sizes: as `prove` takes them.
    """
    result = Canonicalised()
    products_for_einsums(model)
    names = set(wanted)
    for node in [n for n in model.graph.all_nodes() if n.name in names]:
        found = softmax(node)
        if found is None:
            continue
        try:
            _replace(model, found, sizes)
        except NotLowerable as reason:
            result.refused[str(node.name)] = reason
        else:
            result.replaced.add(str(node.name))
    if result.replaced:
        RemoveUnusedNodesPass()(model)
        drop_unused_initializers(model)
    return result


def _replace(model: ir.Model, found: Softmax, sizes: Sequence[Mapping[str, int]]) -> None:
    """As it is; failing that, with the NaN that a softmax gives a query without any key."""
    try:
        apply(model, rewrite(found), sizes)
    except ValueError as error:  # a rank that is not known
        raise NotLowerable(Reason.UNKNOWN_SHAPE, str(error)) from error
    except NotLowerable as plain:
        if plain.reason is not Reason.DISAGREES:
            raise
        try:
            apply(model, rewrite(found, nan_rows=True), sizes)
        except NotLowerable:
            raise plain from None
