"""What a graph's nodes are told by, and which values a value is computed from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import onnx

MODULE, ORIGIN, SITE = "attn_export.module", "attn_export.origin", "attn_export.site"


@dataclass(frozen=True)
class Place:
    """A node of a graph.

    Attributes:
        site: name of the attention site that it implements; empty where it is part of none.
        module: path of the PyTorch submodule; origin: file name and line. Empty where not known.
    """

    node: str
    op: str
    site: str = ""
    module: str = ""
    origin: str = ""

    def __str__(self) -> str:
        where = [f"in {self.module}"] if self.module and self.module != self.site else []
        where += [self.origin] if self.origin else []
        inside = f" ({', '.join(where)})" if where else ""
        named = f"{self.op} '{self.node}'{inside}"
        return f"site {self.site}, {named}" if self.site else named


class Flow:
    """The main graph of a model, from values to the nodes that give and read them."""

    def __init__(self, model: onnx.ModelProto) -> None:
        stored = {tensor.name for tensor in model.graph.initializer}
        self.inputs = {value.name for value in model.graph.input} - stored
        self.nodes = list(model.graph.node)
        self.producer = {
            name: index for index, node in enumerate(self.nodes) for name in node.output if name
        }

    def place(self, index: int) -> Place:
        node = self.nodes[index]
        known = {entry.key: entry.value for entry in node.metadata_props}
        op = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        notes = (known.get(key, "") for key in (SITE, MODULE, ORIGIN))
        return Place(node.name or f"number {index}", op, *notes)

    def reads(self, value: str) -> list[str]:
        """What the node that gives a value is computed from, its subgraphs' reads included."""
        index = self.producer.get(value)
        return [] if index is None else list(dict.fromkeys(_reads(self.nodes[index])))

    def causes(
        self, value: str, good: Collection[str], bad: Collection[str] = ()
    ) -> tuple[list[int], list[str]]:
        """The nodes between a value and those that are known, and the bad ones among these.

        Nodes that only lend a size are left out. The value's own node is the last.
        """
        nodes: set[int] = set()
        met: dict[str, None] = {}
        seen = {value}
        todo = [value]
        while todo:
            index = self.producer.get(todo.pop())
            if index is None or self.nodes[index].op_type in ("Shape", "Size"):
                continue
            nodes.add(index)
            for name in _reads(self.nodes[index]):
                if name in bad and name != value:
                    met[name] = None
                elif name not in good and name not in seen:
                    seen.add(name)
                    todo.append(name)
        return sorted(nodes), list(met)

    def from_inputs(self, index: int) -> bool:
        """Whether what a node gives depends on more of the graph's inputs than their sizes."""
        seen: set[str] = set()
        todo = list(_reads(self.nodes[index]))
        while todo:
            name = todo.pop()
            if name in self.inputs:
                return True
            maker = self.producer.get(name)
            if name in seen or maker is None or self.nodes[maker].op_type in ("Shape", "Size"):
                continue
            seen.add(name)
            todo += _reads(self.nodes[maker])
        return False

    def above(self, values: Iterable[str]) -> set[str]:
        """The values and all that they are computed from."""
        seen = set(values)
        todo = list(seen)
        while todo:
            for name in self.reads(todo.pop()):
                if name not in seen:
                    seen.add(name)
                    todo.append(name)
        return seen


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            inner = {name for child in graph.node for name in child.output}
            for child in graph.node:
                yield from (name for name in _reads(child) if name not in inner)
