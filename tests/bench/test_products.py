"""Arithmetic of matrix products, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from attn_export.bench.products import Products, count, count_model
from attn_export.bench.shapes import Shape
from attn_export.errors import FileError

Sizes = list[int | str]


def graph_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, Sizes],
    known: dict[str, Sizes] | None = None,
    weights: dict[str, Shape] | None = None,
) -> onnx.ModelProto:
    def values(shapes: dict[str, Sizes]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]

    constants = [
        helper.make_tensor(name, TensorProto.FLOAT, shape, bytes(4 * _size(shape)), raw=True)
        for name, shape in (weights or {}).items()
    ]
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", values(inputs), outputs, constants,
                              value_info=values(known or {}))  # fmt: skip
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    opsets.append(helper.make_opsetid("somewhere", 1))
    return helper.make_model(graph, opset_imports=opsets)


def _size(shape: Shape) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def test_a_product_is_two_operations_for_each_pair_that_meets() -> None:
    """(2, 3, 4) @ (4, 5): 2 * 3 * 4 * 5 pairs, twice."""
    model = graph_of([helper.make_node("MatMul", ["x", "w"], ["y"])],
                     {"x": ["batch", 3, 4]}, weights={"w": (4, 5)})  # fmt: skip
    assert count_model(model, {"x": (2, 3, 4)}) == Products(240, {})
    assert count_model(model, {"x": (4, 3, 4)}) == Products(480, {})


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_gemm_sums_over_the_axis_that_it_says(transposed: int) -> None:
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transA=transposed)
    shape: Sizes = [4, 3] if transposed else [3, 4]
    model = graph_of([node], {"x": shape}, weights={"w": (4, 5)})
    assert count_model(model, {}).flops == 2 * 3 * 4 * 5


def test_a_convolution_counts_its_kernel_at_each_output() -> None:
    """4 groups, so that each of 8 outputs sees 2 of the 8 channels; 3x3 at 6x6 places, batch 2."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=4, pads=[1, 1, 1, 1])
    model = graph_of([node], {"x": ["n", 8, 6, 6]}, weights={"w": (8, 2, 3, 3)})
    assert count_model(model, {"x": (2, 8, 6, 6)}).flops == 2 * (2 * 8 * 36) * (2 * 9)


def test_standard_attention_in_both_layouts() -> None:
    """B 2, N 2, S 3, T 5, H 4, Hv 6: 2 * 2 * 2 * 3 * 5 * (4 + 6)."""
    apart = graph_of([helper.make_node("Attention", ["q", "k", "v"], ["y"])],
                     {"q": ["b", 2, 3, 4], "k": ["b", 2, 5, 4], "v": ["b", 2, 5, 6]})  # fmt: skip
    shapes = {"q": (2, 2, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 6)}
    assert count_model(apart, shapes).flops == 1200
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], q_num_heads=2, kv_num_heads=2)
    packed = graph_of([node], {"q": ["b", 3, 8], "k": ["b", 5, 8], "v": ["b", 5, 12]})
    assert count_model(packed, {"q": (2, 3, 8), "k": (2, 5, 8), "v": (2, 5, 12)}).flops == 1200


def test_contrib_attention_holds_its_projections() -> None:
    """Projections 2 * B S D (3 D), then 2 * 2 * B S S D: B 2, S 3, D 8."""
    node = helper.make_node("Attention", ["x", "w", "b"], ["y"], domain="com.microsoft",
                            num_heads=2)  # fmt: skip
    model = graph_of([node], {"x": ["b", 3, 8]}, weights={"w": (8, 24), "b": (24,)})
    assert count_model(model, {"x": (2, 3, 8)}).flops == 2 * 2 * 3 * 8 * 24 + 4 * 2 * 9 * 8


def test_multi_head_and_group_query_attention() -> None:
    """B 1, S 2, N 4, H 3; 5 keys, or 2 and 7 past ones."""
    multi = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft",
                             num_heads=4)  # fmt: skip
    inputs: dict[str, Sizes] = {"q": [1, 2, 12], "k": [1, 5, 12], "v": [1, 5, 8]}
    assert count_model(graph_of([multi], inputs), {}).flops == 2 * 2 * 5 * (12 + 8)
    grouped = helper.make_node("GroupQueryAttention", ["q", "k", "v", "pk", "pv"], ["y"],
                               domain="com.microsoft", num_heads=4, kv_num_heads=2)  # fmt: skip
    past: Sizes = [1, 2, 7, 3]
    inputs = {"q": [1, 2, 12], "k": [1, 2, 6], "v": [1, 2, 6], "pk": past, "pv": past}
    assert count_model(graph_of([grouped], inputs), {}).flops == 4 * 2 * (2 + 7) * 12


def test_sizes_that_the_graph_writes_as_expressions_are_worked_out() -> None:
    """A node that inference does not know gives (batch * 4, 3), of width 43."""
    nodes = [
        helper.make_node("Opaque", ["x"], ["mid"], domain="somewhere"),
        helper.make_node("MatMul", ["mid", "w"], ["y"]),
    ]
    known: dict[str, Sizes] = {"mid": ["batch*4", "floor(width/14 - 1/14) + 3 - width//14"]}
    model = graph_of(nodes, {"x": ["batch", "width"]}, known, {"w": (3, 5)})
    assert count_model(model, {"x": (2, 43)}).flops == 2 * 8 * 3 * 5


def test_what_cannot_be_counted_is_told_by_its_operator() -> None:
    nodes = [
        helper.make_node("Opaque", ["x"], ["mid"], domain="somewhere"),
        helper.make_node("MatMul", ["mid", "w"], ["y"]),
    ]
    model = graph_of(nodes, {"x": ["batch", 3]}, weights={"w": (3, 5)})
    assert count_model(model, {"x": (2, 3)}) == Products(0, {"MatMul": 1})


def test_a_domain_without_a_version_leaves_what_the_graph_says() -> None:
    model = graph_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ["batch", 3]},
                     {"y": ["batch", 5]}, {"w": (3, 5)})  # fmt: skip
    model.graph.node.add(op_type="Opaque", domain="nowhere", input=["y"], output=["z"])
    assert count_model(model, {"x": (2, 3)}) == Products(60, {})


def test_a_file_that_does_not_parse(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"not an onnx file")
    with pytest.raises(FileError, match="does not load"):
        count(tmp_path / "m.onnx", {})


def test_the_trained_vit_counts_to_the_last_operation(digits_bundle: Path) -> None:
    """5 blocks of 24 S D^2 + 4 S^2 D, keys and values of the 6th, and the class token's 20 D^2 +
    4 S D there; the patches and the head: S 17, D 64."""
    blocks = 5 * (24 * 17 * 64**2 + 4 * 17**2 * 64)
    blocks += 4 * 17 * 64**2 + 20 * 64**2 + 4 * 17 * 64
    edges = 2 * 16 * 64 * 4 + 2 * 64 * 10
    found = count(digits_bundle / "model.cpu.onnx", {"image": (1, 1, 8, 8)})
    assert found == Products(blocks + edges, {})
