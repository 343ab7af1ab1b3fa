"""Write einsums of two operands as MatMul, so that attention by einsum looks like any other."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.attention.metadata import origin_of


def products_for_einsums(model: ir.Model) -> None:
    """Replace each einsum that is one batched matrix product.

    Of its letters one is summed over, one stands in the left operand and the output, one in the
    right operand and the output, and all others in all three. Other einsums stay.
    """
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Einsum" and node.domain in ("", "ai.onnx") and len(node.inputs) == 2:
            _replace(node)


def _replace(node: ir.Node) -> None:
    graph = node.graph
    equation = node.attributes["equation"].as_string().replace(" ", "")
    left, right, out = equation.replace("->", ",").split(",") if "->" in equation else ("", "", "")
    letters = {*left, *right, *out}
    if (
        graph is None
        or not letters
        or "." in letters
        or any(len(set(t)) != len(t) for t in (left, right, out))
    ):
        return
    batch = [letter for letter in out if letter in left and letter in right]
    rows = [letter for letter in left if letter in out and letter not in right]
    columns = [letter for letter in right if letter in out and letter not in left]
    summed = [letter for letter in left if letter in right and letter not in out]
    counts = len(rows), len(columns), len(summed)
    if counts != (1, 1, 1) or len(batch) + 3 != len(letters):
        return
    if len(_sizes(node.inputs[0])) != len(left) or len(_sizes(node.inputs[1])) != len(right):
        return  # the rank is unknown
    first, second = node.inputs
    if first is None or second is None:
        return
    nodes: list[ir.Node] = []
    a = _ordered(node, nodes, first, left, [*batch, *rows, *summed])
    b = _ordered(node, nodes, second, right, [*batch, *summed, *columns])
    product = _add(node, nodes, ir.node("MatMul", [a, b]))
    sizes = dict(zip(left, _sizes(first), strict=True))
    sizes |= dict(zip(right, _sizes(second), strict=True))
    natural = [*batch, *rows, *columns]
    product.shape, product.type = ir.Shape([sizes[n] for n in natural]), node.outputs[0].type
    result = _ordered(node, nodes, product, "".join(natural), list(out))
    graph.insert_before(node, nodes)
    name = node.outputs[0].name
    ir.convenience.replace_all_uses_with(node.outputs[0], result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    result.name = name


def _sizes(value: ir.Value | None) -> list[int | ir.SymbolicDim]:
    return [] if value is None or value.shape is None else list(value.shape)


def _ordered(
    einsum: ir.Node, nodes: list[ir.Node], value: ir.Value, term: str, wanted: list[str]
) -> ir.Value:
    """The value with its axes, named by `term`, in the order `wanted`."""
    perm = [term.index(letter) for letter in wanted]
    if perm == sorted(perm):
        return value
    moved = _add(einsum, nodes, ir.node("Transpose", [value], attributes={"perm": perm}))
    sizes = _sizes(value)
    moved.shape, moved.type = ir.Shape([sizes[axis] for axis in perm]), value.type
    return moved


def _add(einsum: ir.Node, nodes: list[ir.Node], node: ir.Node) -> ir.Value:
    node.name = f"{einsum.name}/{node.op_type}_{len(nodes)}"
    node.metadata_props.update(origin_of(einsum))
    nodes.append(node)
    return node.outputs[0]
