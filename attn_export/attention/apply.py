"""Put a rewrite into its graph if it proves equal, and leave the graph as it was if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from attn_export.attention.hostile import MAGNITUDES
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.prove import prove
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.errors import AttnExportError, one_line


def apply(
    model: ir.Model,
    rewrite: Rewrite,
    sizes: Sequence[Mapping[str, int]],
    *,
    brief: bool = False,
    magnitudes: Sequence[float] = MAGNITUDES,
) -> None:
    """Prove and apply.

    Args:
        sizes, brief, magnitudes: as `prove` takes them.

    Raises:
        NotLowerable: it was not applied, since it disagrees or could not be run.
    """
    anchor = rewrite.old.producer()
    if anchor is None or not isinstance(anchor.graph, ir.Graph):
        raise ValueError(f"'{rewrite.old.name}' is not computed in the graph")
    graph = anchor.graph  # the main graph, or the body of an If, a Loop or a Scan
    for weight in rewrite.weights:
        register(graph, weight)
    graph.insert_after(anchor, rewrite.nodes)
    try:
        problem = prove(model, rewrite, sizes, brief=brief, magnitudes=magnitudes).problem
        refusal = NotLowerable(Reason.DISAGREES, f"{rewrite.lowering} differs from it on {problem}")
    except (AttnExportError, ValueError) as error:  # ValueError: it cannot be cut out of its graph
        problem = one_line(error)
        refusal = NotLowerable(Reason.UNPROVABLE, f"{rewrite.lowering} was not run: {problem}")
    if problem:
        graph.remove(rewrite.nodes, safe=True)
        for weight in rewrite.weights:
            graph.initializers.pop(str(weight.name))
        raise refusal
    if any(node.domain == "com.microsoft" for node in rewrite.nodes):
        model.opset_imports.setdefault("com.microsoft", 1)
    upstream = _upstream(rewrite.nodes)
    for old, new in rewrite.pairs:
        _replace(graph, old, new, upstream)
        old.name, new.name = f"{old.name}_unfused", old.name
    if rewrite.also:
        graph.sort()  # what reads a present key may stand before the node that now gives it


def register(graph: ir.Graph, weight: ir.Value) -> None:
    """Add an initializer, under another name where a graph that was lowered before has its own."""
    wanted, number = str(weight.name), 0
    while weight.name in graph.initializers:
        number += 1
        weight.name = f"{wanted}.{number}"
    graph.register_initializer(weight)


def _replace(graph: ir.Graph, old: ir.Value, new: ir.Value, upstream: set[ir.Node]) -> None:
    """Let everything read `new`, but for what the new nodes are computed from."""
    for node, index in list(old.uses()):
        if node not in upstream:
            node.replace_input_with(index, new)
    for index, value in enumerate(graph.outputs):
        if value is old:
            graph.outputs[index] = new


def _upstream(nodes: Sequence[ir.Node]) -> set[ir.Node]:
    """The nodes and all that they are computed from."""
    found: set[ir.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [p for v in node.inputs if v is not None and (p := v.producer()) is not None]
    return found


def drop_unused_initializers(model: ir.Model) -> None:
    """Forget weights that no node reads any more."""
    for graph in model.graphs():
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del graph.initializers[name]
