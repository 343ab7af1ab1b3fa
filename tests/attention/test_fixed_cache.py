"""A graph with growing caches becomes one with buffers, or is refused with the reason."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from attn_export.attention.fixed_cache import fix, growing, new_tokens
from attn_export.errors import ExportError
from attn_export.precision.in_place import prove_in_place
from attn_export.reference import Case

STATE = (("present.k", "past.k", 2), ("present.v", "past.v", 2))
FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
SIZE = 8


def value(name: str, shape: list[int | str], dtype: ir.DataType = FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


class Decoder:
    """One GroupQueryAttention of two heads: x (B, S, 16) is query, key and value.

    `extra` adds nodes that read the past key.
    """

    def __init__(self, *, off: int = 0) -> None:
        self.x = value("x", ["B", "S", 16])
        self.past = [value(f"past.{n}", ["B", 2, "P", SIZE]) for n in "kv"]
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        past = self.op("Shape", [self.past[0]], start=2, end=3)
        new = self.op("Shape", [self.x], start=1, end=2)
        total = self.op("Add", [past, new])
        keys = self.op("Sub", [total, self.constant([1 - off])])
        batch = self.op("Shape", [self.x], start=0, end=1)
        lengths = self.op("Cast", [self.op("Expand", [keys, batch])], INT32, to=int(INT32))
        longest = self.op("Cast", [self.op("Squeeze", [total])], INT32, to=int(INT32))
        self.node = ir.node(
            "GroupQueryAttention", [self.x, self.x, self.x, *self.past, lengths, longest],
            {"num_heads": 2, "kv_num_heads": 2}, domain="com.microsoft", num_outputs=3,
        )  # fmt: skip
        self.nodes.append(self.node)
        y, *presents = self.node.outputs
        y.name, y.type, y.shape = "y", self.x.type, self.x.shape
        for name, present in zip("kv", presents, strict=True):
            present.name, present.type = f"present.{name}", self.x.type
            present.shape = ir.Shape(["B", 2, "P + S", SIZE])
        self.outputs += [y, *presents]

    def op(
        self, name: str, inputs: list[ir.Value], dtype: ir.DataType = INT64, **attributes: int
    ) -> ir.Value:
        node = ir.node(name, inputs, attributes=attributes or None)
        node.name, node.outputs[0].name = f"n{len(self.nodes)}", f"v{len(self.nodes)}"
        node.outputs[0].type = ir.TensorType(dtype)
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, numbers: list[int]) -> ir.Value:
        tensor = ir.tensor(np.array(numbers, np.int64))
        name = f"c{len(self.weights)}"
        made = ir.Value(name=name, const_value=tensor, shape=tensor.shape,
                        type=ir.TensorType(INT64))  # fmt: skip
        self.weights.append(made)
        return made

    def output(self, found: ir.Value, name: str, shape: list[int | str]) -> None:
        found.name, found.shape = name, ir.Shape(shape)
        self.outputs.append(found)

    def model(self) -> ir.Model:
        graph = ir.Graph(
            [self.x, *self.past], self.outputs, nodes=self.nodes, initializers=self.weights,
            opset_imports={"": 23, "com.microsoft": 1}, name="decoder",
        )  # fmt: skip
        graph.sort()
        return ir.Model(graph, ir_version=10)


def cases() -> list[Case]:
    rng = np.random.default_rng(0)
    found = []
    for rows, new, past in ((1, 1, 3), (3, 1, 5), (2, 4, 0), (1, 3, 2)):
        inputs = {"x": rng.standard_normal((rows, new, 16)).astype("f4")}
        for name in "kv":
            cache = rng.standard_normal((rows, 2, past, SIZE)).astype("f4")
            inputs[f"past.{name}"] = cache
        found.append(Case(f"{rows} {new} {past}", "model", inputs, {}, {}, {}))
    return found


def fixed(decoder: Decoder) -> tuple[ir.Model, ir.Model]:
    before, after = decoder.model(), None
    after = before.clone()
    fix(after, growing(after, STATE))
    return before, after


def test_the_number_of_past_tokens_is_an_input() -> None:
    before, after = fixed(Decoder())
    inputs = {v.name: v.shape for v in after.graph.inputs}
    assert inputs["past_length"] == ir.Shape([1])
    assert str(inputs["past.k"]) == str(ir.Shape(["B", 2, "capacity", SIZE]))
    assert [v.name for v in after.graph.outputs] == ["y", "present.k", "present.v"]
    prove_in_place(before, after, STATE, 9, cases())


def test_shapes_of_caches_tell_the_tokens_and_not_the_room() -> None:
    """Whole shapes, parts of them, and those of the present ones, which count new tokens too."""
    decoder = Decoder()
    decoder.output(decoder.op("Shape", [decoder.past[0]]), "whole", [4])
    decoder.output(decoder.op("Shape", [decoder.past[1]], start=-3), "end", [3])
    decoder.output(decoder.op("Shape", [decoder.past[1]], start=0, end=2), "front", [2])
    present = decoder.outputs[1]
    decoder.output(decoder.op("Shape", [present], start=2, end=3), "present", [1])
    before, after = fixed(decoder)
    prove_in_place(before, after, STATE, 9, cases())


def test_a_graph_that_reads_beyond_its_length_is_caught() -> None:
    """seqlens_k counts a key too many: the first position that is not filled."""
    before, _ = fixed(Decoder())
    _, after = fixed(Decoder(off=1))
    with pytest.raises(ExportError, match="'y' is another where its caches are continued"):
        prove_in_place(before, after, STATE, 9, cases()[:1])


def test_nothing_to_compare_is_no_proof() -> None:
    with pytest.raises(ExportError, match="no case has caches to compare"):
        prove_in_place(*fixed(Decoder()), STATE, 9, [])


def test_another_reader_of_a_cache_is_refused() -> None:
    decoder = Decoder()
    decoder.output(decoder.op("Abs", [decoder.past[0]], FLOAT), "size", ["B", 2, "P", SIZE])
    with pytest.raises(ExportError, match=r"'past\.k' is also read by Abs 'n\d+', which would see"):
        fixed(decoder)


def test_a_cache_that_a_concat_grows_is_refused() -> None:
    decoder = Decoder()
    model = decoder.model()
    joined = ir.node("Concat", [decoder.past[0], decoder.past[0]], {"axis": 2}, name="joined")
    joined.outputs[0].name, decoder.outputs[1].name = "present.k", "other"
    joined.outputs[0].shape, joined.outputs[0].type = decoder.outputs[1].shape, decoder.x.type
    model.graph.append(joined)
    model.graph.outputs[1] = joined.outputs[0]
    with pytest.raises(ExportError, match="comes from Concat 'joined' and not from GroupQueryAtt"):
        fix(model, growing(model, STATE))


def test_only_four_axes_of_floats_that_grow_are_caches() -> None:
    model = Decoder().model()
    assert growing(model, STATE) == STATE
    assert new_tokens(model, STATE) == ("P", ir_symbol("S"))
    mask = value("mask", ["B", "P"], INT64)
    model.graph.inputs.append(mask)
    assert growing(model, (*STATE, ("y", "mask", 1))) == STATE


def ir_symbol(name: str) -> object:
    from attn_export.attention.sizes import size_of

    return size_of(name)


def test_caches_that_grow_by_something_else_are_refused() -> None:
    model = Decoder().model()
    for output in model.graph.outputs[1:]:
        output.shape = ir.Shape(["B", 2, "P + 2*S", SIZE])
    with pytest.raises(ExportError, match="the caches grow from P to "):
        new_tokens(model, STATE)
    model.graph.outputs[1].shape = ir.Shape(["B", 2, "P + S", SIZE])
    with pytest.raises(ExportError, match="the caches do not grow alike"):
        new_tokens(model, STATE)
