"""One site cut out of graphs that lower it differently, between values that all of them have."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from attn_export.attention.cutting import cut
from attn_export.attention.metadata import SITE


@dataclass(frozen=True)
class Cuts:
    """The same computation in several graphs.

    Attributes:
        begins, ends: names of values; the parts call them `input_0` and `result` and so on.
        parts: op -> the part of its graph.
    """

    begins: list[str]
    ends: list[str]
    parts: dict[str, onnx.ModelProto]


def cut_site(models: Mapping[str, ir.Model], site: str, known: Collection[str]) -> Cuts:
    """The part of each graph that computes a site.

    It ends at the first values behind the site that every graph has, and begins at the first in
    front of it: a lowering may hold projections and layouts that another leaves outside.

    Args:
        models: op -> a graph in which that op computes the site; all of one canonical graph.
        known: names of the values of that graph: what has another name may mean something else in
            each.

    Raises:
        ValueError: there are no such values, or a part begins somewhere else as well.
    """
    values = {op: values_of(model) for op, model in models.items()}
    common = set(known).intersection(*values.values())
    regions = {op: _region(model, site) for op, model in models.items()}
    ends: dict[str, None] = {}
    for region in regions.values():
        ends |= dict.fromkeys(_behind(region, common))
    if not ends:
        raise ValueError(f"nothing behind '{site}' is in all graphs")
    begins: dict[str, None] = {}
    for op in models:
        begins |= dict.fromkeys(_front([values[op][name] for name in ends], common - ends.keys()))
    parts = {
        op: cut(model, [values[op][n] for n in begins], [values[op][n] for n in ends])
        for op, model in models.items()
    }
    return Cuts(list(begins), list(ends), parts)


def values_of(model: ir.Model) -> dict[str, ir.Value]:
    """What is computed in the main graph, and its inputs."""
    found = {str(value.name): value for value in model.graph.inputs}
    found |= {str(v.name): v for node in model.graph for v in node.outputs if v.name}
    return found


def _region(model: ir.Model, site: str) -> list[ir.Node]:
    found = [node for node in model.graph if node.metadata_props.get(SITE) == site]
    if not found:
        raise ValueError(f"'{site}' is not in the main graph")
    return found


def _behind(region: Sequence[ir.Node], common: set[str]) -> list[str]:
    inside = {id(node) for node in region}
    todo = [value for node in region for value in node.outputs]
    found: list[str] = []
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        readers = [node for node, _ in value.uses() if id(node) not in inside]
        if value.name in common and (readers or value.is_graph_output()):
            found.append(str(value.name))
        else:
            todo += [output for node in readers for output in node.outputs]
    return found


def _front(ends: Sequence[ir.Value], common: set[str]) -> list[str]:
    found: list[str] = []
    seen: set[int] = set()
    todo = list(ends)
    while todo:
        value = todo.pop()
        if id(value) in seen or value.is_initializer():
            continue
        seen.add(id(value))
        if value.name in common:
            found.append(str(value.name))
            continue
        node = value.producer()
        if node is not None:
            todo += [source for source in node.inputs if source is not None]
    return found
