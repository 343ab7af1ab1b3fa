"""Small graphs whose values can be written down, and mutants of a bundle's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from attn_export import bundle as bundles
from tests.boundary import reseal

Weight = Callable[[str], NDArray[np.float32]]
HALF, SINGLE = TensorProto.FLOAT16, TensorProto.FLOAT
SHAPE = [1, 4, 8]


def model(
    nodes: list[onnx.NodeProto], constants: Mapping[str, Any], kind: int = SINGLE, out: str = "y"
) -> onnx.ModelProto:
    """A graph from `x` to `out`, both (1, 4, 8); nodes are named after what they give."""
    for node in nodes:
        node.name = f"node_{node.output[0]}"
    values = [helper.make_tensor_value_info(name, kind, SHAPE) for name in ("x", out)]
    tensors = [numpy_helper.from_array(np.asarray(array), n) for n, array in constants.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def mutate(folder: Path, edit: Callable[[onnx.ModelProto, Weight], None]) -> None:
    """Change the graph or the weights of a bundle; its hashes are made to fit, as a forger would.

    `edit` gets the graph and a function that gives a weight, to be written into.
    """
    (path,) = folder.glob("*.cpu.onnx")
    proto = onnx.load(path, load_external_data=False)
    raw = bytearray((folder / bundles.WEIGHTS).read_bytes())

    def weight(name: str) -> NDArray[np.float32]:
        (tensor,) = (t for t in proto.graph.initializer if t.name == name)
        place = {entry.key: int(entry.value) for entry in tensor.external_data[1:]}
        count = int(np.prod(tensor.dims))
        array = np.frombuffer(raw, np.float32, count, place["offset"])
        return array.reshape(list(tensor.dims))

    edit(proto, weight)
    path.write_bytes(proto.SerializeToString())
    (folder / bundles.WEIGHTS).write_bytes(raw)
    reseal(folder)


def site_node(proto: onnx.ModelProto, site: str) -> onnx.NodeProto:
    """The fused op of a site."""
    return next(
        node
        for node in proto.graph.node
        if any(p.key == "attn_export.site" and p.value == site for p in node.metadata_props)
        and "Attention" in node.op_type
    )


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
