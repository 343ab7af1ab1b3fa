"""Add and LayerNormalization as one com.microsoft node, which also gives the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attn_export.attention.apply import apply
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.reasons import NotLowerable
from attn_export.attention.sizes import sizes

NAME = "com.microsoft.SkipLayerNormalization"
EPSILON, SKIP_EPSILON = 1e-5, 1e-12  # defaults of LayerNormalization and of the fused op


def fuse_skip_layer_norm(model: ir.Model, bindings: Sequence[Mapping[str, int]]) -> int:
    """Fuse each in place, once it proves equal; how many were.

    ONNX Runtime's own optimiser does it only where nothing else reads the sum.
    Specification: ONNX Runtime contrib operators, com.microsoft.SkipLayerNormalization.
    """
    done = 0
    for node in [n for n in model.graph if n.op_type == "LayerNormalization"]:
        found = _rewrite(node)
        if found is None:
            continue
        try:
            apply(model, found, bindings, brief=done > 0)
        except NotLowerable:  # it stays as it was
            continue
        done += 1
    if done:
        RemoveUnusedNodesPass()(model)
    return done


def _rewrite(norm: ir.Node) -> Rewrite | None:
    total = norm.inputs[0]
    add = None if total is None else total.producer()
    if add is None or add.op_type != "Add" or total is None or len(norm.inputs) < 3:
        return None
    one, other = add.inputs
    if one is None or other is None or not (_is_computed(one) and _is_computed(other)):
        return None
    try:
        same = len(sizes(total)) == 3 and sizes(one) == sizes(other) == sizes(total)
    except ValueError:  # a rank is unknown
        return None
    axis = norm.attributes.get_int("axis", -1)
    if not same or axis not in (-1, 2) or any(v.uses() for v in norm.outputs[1:]):
        return None
    fused = ir.node(
        "SkipLayerNormalization", [one, other, norm.inputs[1], norm.inputs[2]],
        attributes={"epsilon": norm.attributes.get_float("epsilon", EPSILON)},
        domain="com.microsoft", num_outputs=4,
    )  # fmt: skip
    fused.name = f"{norm.name}/skip"
    fused.metadata_props.update(norm.metadata_props)
    normed, _, _, summed = fused.outputs
    for unused in fused.outputs[1:3]:
        unused.name = ""
    for new, old in ((normed, norm.outputs[0]), (summed, total)):
        new.shape, new.type = old.shape, old.type
    also = [(total, summed)]
    return Rewrite(NAME, [one, other], norm.outputs[0], normed, [fused], [], None, also)


def _is_computed(value: ir.Value) -> bool:
    return value.producer() is not None or value.is_graph_input()


def split_skip_layer_norm(model: ir.Model) -> None:
    """The reverse, in place: a sum, also with a bias, and LayerNormalization."""
    for node in [n for n in model.graph if n.op_type == "SkipLayerNormalization"]:
        one, other, weight, *rest = node.inputs
        beta, bias = (*rest, None, None)[:2]
        if node.domain != "com.microsoft" or any(v.uses() for v in node.outputs[1:3]):
            continue
        addends = [one, *([] if bias is None else [bias]), other]
        nodes: list[ir.Node] = []
        total = addends[0]
        for addend in addends[1:]:
            nodes.append(ir.node("Add", [total, addend], name=f"{node.name}/Add_{len(nodes)}"))
            total = nodes[-1].outputs[0]
            total.shape, total.type = node.outputs[0].shape, node.outputs[0].type
        epsilon = node.attributes.get_float("epsilon", SKIP_EPSILON)
        norm = ir.node(
            "LayerNormalization", [total, weight, *([] if beta is None else [beta])],
            attributes={"epsilon": epsilon, "axis": -1}, name=str(node.name).removesuffix("/skip"),
        )  # fmt: skip
        norm.metadata_props.update(node.metadata_props)
        model.graph.insert_before(node, [*nodes, norm])
        pairs = [(node.outputs[0], norm.outputs[0])]
        pairs += [(old, total) for old in node.outputs[3:] if total is not None and old.name]
        for old, new in pairs:
            new.shape, new.type = old.shape, old.type
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            old.name, new.name = f"{old.name}_fused", old.name
        model.graph.remove(node, safe=True)
