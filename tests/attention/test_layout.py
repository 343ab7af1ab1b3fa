"""Layout algebra against ONNX's own evaluator, which moves real elements."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from attn_export.attention.layout import View, identity, trace


class Chain:
    """A graph of layout nodes, grown one node at a time, with its shapes worked out by numpy."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.root = ir.val("root", ir.DataType.INT64, ir.Shape(shape))
        self.value, self.array = self.root, np.arange(math.prod(shape)).reshape(shape)
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []

    def constant(self, numbers: list[int] | int) -> ir.Value:
        name = f"c{len(self.constants)}"
        tensor = ir.tensor(np.array(numbers, dtype=np.int64), name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
        value.const_value = tensor
        self.constants.append(value)
        return value

    def add(self, op: str, *inputs: ir.Value, array: np.ndarray, **attributes: object) -> None:
        node = ir.node(op, [self.value, *inputs], attributes=attributes or None)
        node.outputs[0].shape, node.outputs[0].dtype = ir.Shape(array.shape), ir.DataType.INT64
        node.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(node)
        self.value, self.array = node.outputs[0], array

    def evaluate(self) -> np.ndarray:
        graph = ir.Graph(
            [self.root], [self.value], nodes=self.nodes, initializers=self.constants,
            opset_imports={"": 23},
        )  # fmt: skip
        root = np.arange(math.prod(self.root.shape.numpy())).reshape(self.root.shape.numpy())
        model = ir.to_proto(ir.Model(graph, ir_version=10))
        return np.asarray(ReferenceEvaluator(model).run(None, {"root": root})[0])


def elements(view: View, shape: tuple[int, ...]) -> np.ndarray:
    """The root element of every position of a view, by its definition."""
    root_shape = tuple(view.root.shape.numpy())
    steps = np.cumprod((1, *root_shape[:0:-1]))[::-1]
    total = np.full((1,) * len(view.axes), int(np.dot(view.offset, steps)), dtype=np.int64)
    for axis, row in enumerate(view.axes):
        flat = np.zeros(1, dtype=np.int64)
        for atom in row:
            stride = atom.stride * int(steps[atom.axis])
            flat = (flat[:, None] + np.arange(atom.size) * stride).reshape(-1)
        total = total + flat.reshape([-1 if i == axis else 1 for i in range(len(view.axes))])
    return np.broadcast_to(total, shape)


def split_sizes(draw: st.DrawFn, total: int, parts: int) -> list[int]:
    sizes = []
    for _ in range(parts - 1):
        size = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
        sizes.append(size)
        total //= size
    return draw(st.permutations([*sizes, total]))


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    chain = Chain(tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))))
    for _ in range(draw(st.integers(1, 6))):
        a = chain.array
        axis = draw(st.integers(0, a.ndim - 1)) if a.ndim else 0
        kind = draw(st.sampled_from(["Reshape", "Transpose", "Slice", "Gather", "Unsqueeze"]))
        if kind == "Reshape":
            shape = split_sizes(draw, a.size, draw(st.integers(1, 4)))
            chain.add("Reshape", chain.constant(shape), array=a.reshape(shape))
        elif kind == "Transpose":
            perm = draw(st.permutations(range(a.ndim)))
            chain.add("Transpose", array=a.transpose(perm), perm=list(perm))
        elif kind == "Slice" and a.ndim:
            start = draw(st.integers(0, a.shape[axis] - 1))
            stop = draw(st.integers(start + 1, a.shape[axis]))
            numbers = [chain.constant([n]) for n in (start, stop, axis)]
            index = tuple(slice(start, stop) if i == axis else slice(None) for i in range(a.ndim))
            chain.add("Slice", *numbers, array=a[index])
        elif kind == "Gather" and a.ndim:
            index = draw(st.integers(-a.shape[axis], a.shape[axis] - 1))
            chain.add("Gather", chain.constant(index), array=a.take(index, axis), axis=axis)
        else:
            chain.add("Unsqueeze", chain.constant([0]), array=a[None])
    return chain


@settings(max_examples=300, deadline=None)
@given(chains())
def test_a_view_names_the_elements_that_onnx_moves_there(chain: Chain) -> None:
    np.testing.assert_array_equal(chain.evaluate(), chain.array)  # the test's own arithmetic
    view = trace(chain.value)
    shape = chain.array.shape
    inner = chain.array.reshape(-1)
    if view.root is not chain.root:  # the walk ended early: it must say so by another root
        partial = trace(view.root)
        assert partial.root is view.root
        return
    np.testing.assert_array_equal(elements(view, shape), inner.reshape(shape))


def qkv_chain(order: tuple[int, ...]) -> Chain:
    """(2, 5, 3 * 4 * 6) -> one of q, k, v as (2, 4, 5, 6), as people write it."""
    chain = Chain((2, 5, 72))
    parts = chain.array.reshape(2, 5, 3, 4, 6)
    chain.add("Reshape", chain.constant([2, 5, 3, 4, 6]), array=parts)
    chain.add("Transpose", array=parts.transpose(order), perm=list(order))
    return chain


def test_packed_projection_gives_the_columns_of_each_head() -> None:
    chain = qkv_chain((2, 0, 3, 1, 4))
    chain.add("Gather", chain.constant(1), array=chain.array[1], axis=0)
    view = trace(chain.value)
    columns = view.indices((1, 3), 2)
    assert view.root is chain.root
    assert view.covers(0, 0)
    assert view.covers(2, 1)
    assert columns is not None
    assert columns[0, 0] == 24  # keys begin behind 4 heads of 6 query columns
    assert columns[2, 5] == 24 + 2 * 6 + 5


def test_symbolic_sizes_survive_a_round_trip() -> None:
    root = ir.val("x", ir.DataType.FLOAT, ir.Shape(["batch", "tokens", 8]))
    split = ir.node("Reshape", [root, None])
    split.outputs[0].shape = ir.Shape(["batch", "tokens", 2, 4])
    swap = ir.node("Transpose", split.outputs, attributes={"perm": [0, 2, 1, 3]})
    swap.outputs[0].shape = ir.Shape(["batch", 2, "tokens", 4])
    back = ir.node("Transpose", swap.outputs, attributes={"perm": [0, 2, 1, 3]})
    back.outputs[0].shape = ir.Shape(["batch", "tokens", 2, 4])
    merge = ir.node("Reshape", [back.outputs[0], None])
    merge.outputs[0].shape = ir.Shape(["batch", "tokens", 8])
    assert trace(merge.outputs[0]).same_as(identity(root))
    assert not trace(swap.outputs[0]).same_as(identity(root))


def test_merging_batch_into_tokens_is_not_the_identity() -> None:
    root = ir.val("x", ir.DataType.FLOAT, ir.Shape(["batch", "tokens", 8]))
    flat = ir.node("Reshape", [root, None])
    flat.outputs[0].shape = ir.Shape(["batch*tokens", 8])
    view = trace(flat.outputs[0])
    assert view.root is root
    assert [atom.axis for atom in view.axes[0]] == [0, 1]


@pytest.mark.parametrize("order", [(2, 0, 3, 1, 4), (2, 1, 3, 0, 4)])
def test_swapping_batch_and_tokens_shows(order: tuple[int, ...]) -> None:
    chain = qkv_chain(order)
    chain.add("Gather", chain.constant(0), array=chain.array[0], axis=0)
    assert trace(chain.value).covers(0, 0) == (order[1] == 0)
