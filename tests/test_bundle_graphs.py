"""A bundle's graph may read the bundle's own files and nothing else of the host."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from onnx.external_data_helper import set_external_data

from attn_export import bundle as bundles
from attn_export.errors import FileError
from tests.boundary import reseal


def refused(folder: Path) -> str:
    with pytest.raises(FileError) as raised:
        bundles.read(folder)
    return str(raised.value)


def external(location: str) -> onnx.TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], raw_data=bytes(16))
    set_external_data(tensor, location, offset=0, length=16)
    tensor.ClearField("raw_data")
    return tensor


def graph_with(place: str, location: str) -> onnx.ModelProto:
    """A graph that keeps one tensor in `location`: in a Constant, a subgraph, a function, ..."""
    tensor = external(location)
    constant = helper.make_node("Constant", [], ["c"], value=tensor)
    nodes, initializers, functions, sparse = [], [], [], []
    match place:
        case "initializer":
            initializers = [tensor]
        case "sparse":
            indices = helper.make_tensor("i", TensorProto.INT64, [4], range(4))
            sparse = [helper.make_sparse_tensor(tensor, indices, [4])]
        case "constant":
            nodes = [constant]
        case "sparse constant":
            indices = helper.make_tensor("i", TensorProto.INT64, [4], range(4))
            value = helper.make_sparse_tensor(tensor, indices, [4])
            nodes = [helper.make_node("Constant", [], ["c"], sparse_value=value)]
        case "subgraph":
            inner = helper.make_graph(
                [constant], "g", [], [helper.make_empty_tensor_value_info("c")]
            )
            nodes = [helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)]
        case "function":
            opsets = [helper.make_opsetid("", 23)]
            functions = [helper.make_function("d", "f", [], ["c"], [constant], opsets)]
    graph = helper.make_graph(nodes, "g", [], [], initializers, sparse_initializer=sparse)
    return helper.make_model(graph, functions=functions)


PLACES = ["initializer", "sparse", "constant", "sparse constant", "subgraph", "function"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["/etc/passwd", "../weights.data", "unlisted.data"])
def test_a_graph_that_reads_outside_of_the_bundle_is_refused(
    bundle_copy: Path, place: str, location: str
) -> None:
    model = graph_with(place, location)
    (bundle_copy / "model.cpu.onnx").write_bytes(model.SerializeToString())
    reseal(bundle_copy)
    assert f"keeps its weights in '{location}', which is not a file of the bundle" in refused(
        bundle_copy
    )


def test_a_graph_that_does_not_parse_is_refused(bundle_copy: Path) -> None:
    (bundle_copy / "model.cpu.onnx").write_bytes(b"\xff\xff\xff")
    reseal(bundle_copy)
    assert "is not an ONNX model" in refused(bundle_copy)
