"""A mask that is declared right padded becomes lengths, and only where it is nothing else."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from attn_export.attention.find import find
from attn_export.attention.form import form_of
from attn_export.attention.hostile import _draw
from attn_export.attention.lowering import lower
from attn_export.attention.padding import declare
from attn_export.attention.site import Account
from attn_export.capability import preference, why_not
from attn_export.errors import UsageError
from tests.attention.plain import SIZES, become, model, node, run, truth

CONTRIB, MHA = "com.microsoft.Attention", "com.microsoft.MultiHeadAttention"
GQA, STANDARD = "com.microsoft.GroupQueryAttention", "ai.onnx.Attention"
AXES = {"axes": np.array([1, 2], np.int64)}
ONE = {"one": np.array(1, np.int64), "zero": np.array(0, np.int64)}
CAUSAL = [
    node("Shape", "q", "queries", start=2, end=3), node("Squeeze", "queries", "count"),
    node("Range", "zero count one", "steps"), node("Unsqueeze", "steps last", "rows"),
    node("GreaterOrEqual", "rows steps", "triangle"),
]  # fmt: skip


def padded(
    keeps: int | None = 1, causal: bool = False, heads: int = 2, kv_heads: int = 2, opset: int = 23
) -> ir.Model:
    """Attention of (B, heads, S, 8) with a padding mask (B, T); S is T where it is causal."""
    T = "S" if causal else "T"
    inputs = {
        "q": ("B", heads, "S", 8), "k": ("B", kv_heads, T, 8), "v": ("B", kv_heads, T, 8),
        "keep": ("B", T),
    }  # fmt: skip
    nodes = [node("Unsqueeze", "keep axes", "whole")]
    mask = "whole"
    if keeps == 0:
        nodes.append(node("Not", "whole", "allowed"))
        mask = "allowed"
    if causal:
        nodes += [*CAUSAL, node("And", f"{mask} triangle", "both")]
        mask = "both"
    made = [*nodes, node("Attention", f"q k v {mask}", "y")]
    constants = {**AXES, **ONE, "last": np.array([1], np.int64)}
    graph = model(inputs, made, {"y": ("B", heads, "S", 8)}, constants)
    graph.opset_imports[""] = opset
    for n in graph.graph:
        n.version = opset if n.op_type == "Attention" else n.version
    if keeps is not None:
        declare(graph, {"keep": keeps})
    return graph


def inputs(
    S: int, T: int, heads: int = 2, kv_heads: int = 2, scale: float = 1.0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(S)
    shapes = {"q": (3, heads, S, 8), "k": (3, kv_heads, T, 8), "v": (3, kv_heads, T, 8)}
    drawn = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    return {**drawn, "q": drawn["q"] * np.float32(scale)}


def lengths(T: int) -> tuple[np.ndarray, np.ndarray]:
    """A mask of lengths 1, T // 2 and T, and the same to broadcast against scores."""
    keep = np.arange(T) < np.array([[1], [max(1, T // 2)], [T]])
    return keep, keep[:, None, None]


def lowered(graph: ir.Model, runtime: str = "ort-cpu", choice: str = "auto") -> Account:
    return lower(graph, runtime, SIZES, choice)


def test_a_declared_mask_becomes_lengths_and_nothing_else_is_left_of_it() -> None:
    graph = padded()
    (site,) = find(graph)
    assert (site.mask, site.causal, site.exact) == ("lengths", "none", False)
    fused = become(graph, MHA)
    assert {n.op_type for n in graph.graph} == {
        "Cast", "ReduceSum", "MultiHeadAttention", "Transpose", "Reshape"
    }  # fmt: skip
    assert fused.inputs[4] is not None
    assert fused.inputs[4].dtype == ir.DataType.INT32


@pytest.mark.parametrize("keeps", [1, 0])
@pytest.mark.parametrize("scale", [1.0, 3e4])
@pytest.mark.parametrize(("S", "T"), [(4, 4), (2, 6), (5, 3), (1, 5)])
def test_each_row_sees_as_many_keys_as_its_mask_keeps(
    keeps: int, scale: float, S: int, T: int
) -> None:
    """Scores of 1e5 too, which the op's own -10,000 would not block."""
    graph = padded(keeps)
    become(graph, MHA)
    given = inputs(S, T, scale=scale)
    keep, mask = lengths(T)
    (y,) = run(graph, **given, keep=keep == bool(keeps))
    np.testing.assert_allclose(y, truth(**given, keep=mask), atol=2e-6)


@pytest.mark.parametrize(("op", "kv_heads"), [(MHA, 2), (GQA, 1), (GQA, 2)])
@pytest.mark.parametrize("S", [1, 4, 7])
def test_lengths_of_a_causal_site_mask_its_later_keys_too(op: str, kv_heads: int, S: int) -> None:
    graph = padded(causal=True, kv_heads=kv_heads)
    (site,) = find(graph)
    assert (site.mask, site.causal) == ("lengths", "upper-left")
    become(graph, op, [{"B": 3, "S": 5}, {"B": 1, "S": 3}])
    assert not {"And", "Where", "Unsqueeze", "Range"} & {n.op_type for n in graph.graph}
    given = inputs(S, S, kv_heads=kv_heads)
    keep, mask = lengths(S)
    (y,) = run(graph, **given, keep=keep)
    np.testing.assert_allclose(y, truth(**given, keep=mask & np.tri(S, dtype=bool)), atol=2e-6)


def test_standard_attention_takes_lengths_from_opset_24_on() -> None:
    graph = padded(opset=24)
    assert become(graph, STANDARD).inputs[3] is None
    given = inputs(3, 6)
    keep, mask = lengths(6)
    (y,) = run(graph, **given, keep=keep)
    np.testing.assert_allclose(y, truth(**given, keep=mask), atol=2e-6)


@pytest.mark.parametrize(("opset", "causal"), [(23, False), (24, True)])
def test_where_an_op_cannot_take_lengths_it_takes_the_mask(opset: int, causal: bool) -> None:
    graph = padded(opset=opset, causal=causal)
    (outcome,) = lowered(graph, choice="standard").outcomes
    assert (outcome.lowering, outcome.site.mask) == (STANDARD, "lengths")
    (fused,) = [n for n in graph.graph if n.op_type == "Attention"]
    assert fused.inputs[3] is not None
    given = inputs(4, 4)
    keep, mask = lengths(4)
    (y,) = run(graph, **given, keep=keep)
    np.testing.assert_allclose(
        y, truth(**given, keep=mask & (np.tri(4) > 0 if causal else True)), atol=2e-6
    )


def test_without_the_promise_the_same_mask_keeps_its_holes() -> None:
    """Values 0, 1, 2, 3 and the mask 1, 0, 1, 0: the mean is 1, as lengths it would be 0.5."""
    graph = padded(keeps=None)
    (outcome,) = lowered(graph).outcomes
    assert outcome.site.mask == "bool"
    zero = np.zeros((1, 2, 4, 8), np.float32)
    v = zero + np.arange(4, dtype=np.float32).reshape(4, 1)
    (y,) = run(graph, q=zero, k=zero, v=v, keep=np.array([[True, False, True, False]]))
    np.testing.assert_allclose(y, np.ones_like(y), atol=1e-6)


@pytest.mark.parametrize("extra", ["queries", "other"])
def test_a_mask_that_is_more_than_lengths_stays_dense(extra: str) -> None:
    """Padded queries that see nothing; and a second input."""
    shapes = {
        "q": ("B", 2, "S", 8), "k": ("B", 2, "S", 8), "v": ("B", 2, "S", 8), "keep": ("B", "S"),
        "keep2": ("B", 1, 1, "S"),
    }  # fmt: skip
    rows = [node("Unsqueeze", "keep last", "rows")] if extra == "queries" else []
    nodes = [
        node("Unsqueeze", "keep axes", "columns"), *rows,
        node("And", f"columns {'rows' if rows else 'keep2'}", "both"),
        node("Attention", "q k v both", "y"),
    ]  # fmt: skip
    constants = {**AXES, "last": np.array([1, 3], np.int64)}
    graph = model(shapes, nodes, {"y": ("B", 2, "S", 8)}, constants)
    declare(graph, {"keep": 1})
    (site,) = find(graph)
    assert (site.mask, site.lengths) == ("bool", None)


def test_layers_share_the_lengths() -> None:
    shapes = {
        "q": ("B", 2, "S", 8),
        "k": ("B", 2, "T", 8),
        "v": ("B", 2, "T", 8),
        "keep": ("B", "T"),
    }
    nodes = [
        node("Unsqueeze", "keep axes", "mask"), node("Attention", "q k v mask", "x"),
        node("Attention", "x k v mask", "y"),
    ]  # fmt: skip
    graph = model(shapes, nodes, {"y": ("B", 2, "S", 8)}, AXES)
    declare(graph, {"keep": 1})
    account = lowered(graph, choice="contrib")
    assert account.lowered == 2
    assert [n.op_type for n in graph.graph].count("ReduceSum") == 1


def test_hostile_masks_are_right_padded_with_lengths_from_one_on() -> None:
    (value,) = [v for v in padded(keeps=0).graph.inputs if v.name == "keep"]
    drawn = _draw(np.random.default_rng(0), value, {"B": 6, "T": 5}, 1.0, False)
    assert drawn.dtype == np.bool_
    kept = ~drawn
    assert sorted(set(kept.sum(axis=1))) == [1, 2, 3, 4, 5]
    assert (kept[:, :-1] >= kept[:, 1:]).all()


def test_cuda_prefers_an_op_with_lengths() -> None:
    """The standard op first at opset 24, which reaches Flash Attention with them."""
    wanted = {23: (False, MHA), 24: (True, STANDARD)}
    for opset, (flash, op) in wanted.items():
        (site,) = find(graph := padded(opset=opset))
        order = preference("ort-cuda", form_of(site, "", opset)).ops
        assert (order[0] == STANDARD) is flash
        (outcome,) = lowered(graph, "ort-cuda").outcomes
        assert (outcome.lowering, outcome.proved) == (op, "stand-in")
        assert not {"Where", "Expand"} & {n.op_type for n in graph.graph}


def test_grouped_causal_sites_keep_their_dense_mask_on_cuda() -> None:
    """GroupQueryAttention lets padded queries see padding there, where no past is given."""
    (site,) = find(graph := padded(causal=True, kv_heads=1))
    refusal = why_not(GQA, "ort-cuda", "1.31.1", form_of(site, GQA, 23))
    assert refusal is not None
    (outcome,) = lowered(graph, "ort-cuda").outcomes
    assert outcome.lowering == STANDARD
    (fused,) = [n for n in graph.graph if n.op_type == "Attention"]
    assert fused.inputs[3] is not None


@pytest.mark.parametrize(("name", "words"), [
    ("mask", "no input 'mask'"), ("q", "FLOAT with 4 axes"),
])  # fmt: skip
def test_an_input_that_cannot_be_right_padded_is_refused(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        declare(padded(keeps=None), {name: 1})
