"""Whether a mask's numbers may block, and the values at which its proof begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from attn_export.attention.masks import mask_sources, may_block, may_hold_lowest
from tests.attention.plain import Shape, model, node

LOW = float(np.finfo(np.float32).min)
CONSTANTS = {
    "low": np.float32(LOW), "high": np.float32(1e9), "one": np.float32(1), "zero": np.float32(0),
    "w": np.ones((4, 4), np.float32), "table": np.ones((9, 4), np.float32),
    "none": np.float32(-np.inf), "pads": np.zeros(4, np.int64),
    "blocking_table": np.full((9, 4), -1e9, np.float32), "four": np.array([4, 4]),
}  # fmt: skip
INPUTS: dict[str, Shape] = {"x": (4, 4), "keep": (4, 4)}
NUMBERS = node("Cast", "keep", "numbers", to=1)
IDS = node("Cast", "keep", "ids", to=7)

Case = tuple[str, Sequence[onnx.NodeProto], bool, set[str]]
CASES: list[Case] = [
    ("a float input", [node("Neg", "x", "mask")], True, {"mask"}),
    ("a product", [node("MatMul", "x w", "p"), node("Mul", "p one", "mask")], False, {"mask"}),
    ("a sigmoid", [node("Sigmoid", "x", "mask")], False, {"mask"}),
    ("truth values as numbers", [NUMBERS, node("Identity", "numbers", "mask")], False, {"keep"}),
    ("their logarithm", [NUMBERS, node("Log", "numbers", "mask")], True, {"keep"}),
    ("one less them times low",
     [NUMBERS, node("Sub", "one numbers", "lost"), node("Mul", "lost low", "mask")],
     True, {"keep"}),
    ("a large number that is taken off",
     [NUMBERS, node("Mul", "numbers high", "far"), node("Neg", "far", "mask")], True, {"keep"}),
    ("a table", [IDS, node("Gather", "table ids", "mask")], False, {"keep"}),
    ("a table that blocks", [IDS, node("Gather", "blocking_table ids", "mask")], True, {"keep"}),
    ("a choice by an input between a product and low",
     [node("MatMul", "x w", "p"), node("Where", "keep p low", "mask")], True, {"keep", "p"}),
    ("a choice by float numbers",
     [node("Less", "x zero", "late"), node("Where", "late low zero", "mask")], True, {"mask"}),
    ("a choice by floats that are made of truth values",
     [NUMBERS, node("Trilu", "numbers", "lower", upper=0), node("Less", "lower one", "lost"),
      node("Where", "lost low zero", "mask")], True, {"keep"}),
    ("a product padded with low",
     [node("MatMul", "x w", "p"), node("Pad", "p pads low", "mask")], True, {"p"}),
    ("a choice of -inf raised to low",
     [node("Where", "keep zero none", "cut"), node("Clip", "cut low", "mask")], True, {"keep"}),
    ("sizes alone",
     [node("ConstantOfShape", "four", "zeros"), node("Add", "zeros low", "mask")], True, set()),
]  # fmt: skip


def mask_of(nodes: Sequence[onnx.NodeProto]) -> ir.Value:
    graph = model(INPUTS, list(nodes), {}, CONSTANTS).graph
    return next(v for n in graph for v in n.outputs if v.name == "mask")


@pytest.mark.parametrize(("nodes", "blocks"), [c[1:3] for c in CASES], ids=[c[0] for c in CASES])
def test_whether_a_mask_may_block(nodes: Sequence[onnx.NodeProto], blocks: bool) -> None:
    assert may_block(mask_of(nodes)) is blocks


INFINITE: list[tuple[str, Sequence[onnx.NodeProto]]] = [
    ("a choice between a table and -inf",
     [IDS, node("Gather", "table ids", "p"), node("Where", "keep p none", "mask")]),
    ("the same without a choice", [node("Where", "keep zero none", "mask")]),
    ("a sum of two", [node("Where", "keep zero none", "cut"), node("Add", "cut w", "mask")]),
]  # fmt: skip


@pytest.mark.parametrize("nodes", [c[1] for c in INFINITE], ids=[c[0] for c in INFINITE])
def test_a_mask_of_infinity_alone_blocks_and_does_not_hold_the_most_negative_number(
    nodes: Sequence[onnx.NodeProto],
) -> None:
    mask = mask_of(nodes)
    assert may_block(mask)
    assert not may_hold_lowest(mask)


@pytest.mark.parametrize(("nodes", "blocks"), [c[1:3] for c in CASES], ids=[c[0] for c in CASES])
def test_no_other_mask_that_blocks_is_taken_for_one(
    nodes: Sequence[onnx.NodeProto], blocks: bool
) -> None:
    assert may_hold_lowest(mask_of(nodes)) is blocks


@pytest.mark.parametrize(
    ("nodes", "sources"), [(c[1], c[3]) for c in CASES], ids=[c[0] for c in CASES]
)
def test_where_the_proof_of_a_mask_begins(
    nodes: Sequence[onnx.NodeProto], sources: set[str]
) -> None:
    assert {value.name for value in mask_sources(mask_of(nodes))} == sources
