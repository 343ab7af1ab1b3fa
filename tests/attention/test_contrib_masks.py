"""Masks as com.microsoft MultiHeadAttention and Attention get them, with PyTorch's answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_export.attention.apply import apply
from attn_export.attention.find import find
from attn_export.attention.lowering import BUILDERS, lower
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import ExportSpec
from tests.attention import modules as m
from tests.attention.graphs import BATCH, TOKENS, op_types, seeded
from tests.attention.graphs import run as run_module
from tests.attention.plain import attention, become, model, node, run, truth

CONTRIB, MHA = "com.microsoft.Attention", "com.microsoft.MultiHeadAttention"
MASKS = [
    ("S", "T"), ("B", 1, "S", "T"), ("B", 2, "S", "T"), (2, "S", "T"), (1, 1, 1, "T"),
    ("B", 1, 1, "T"), ("T",),
]  # fmt: skip
NUMBERS = {"B": 3, "S": 3, "T": 5}


def drawn(*shape: int | str) -> np.ndarray:
    rng = np.random.default_rng(len(shape))
    sizes = [NUMBERS.get(str(s), s) for s in shape]
    return rng.standard_normal([int(s) for s in sizes]).astype(np.float32)


def operands(v_size: int = 8) -> dict[str, np.ndarray]:
    return {
        "q": drawn("B", 2, "S", 8), "k": drawn("B", 2, "T", 8), "v": drawn("B", 2, "T", v_size)
    }  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
def test_bool_masks_of_every_shape_block_and_a_query_without_keys_gets_zero(
    mask: tuple[int | str, ...],
) -> None:
    graph = attention(mask, v_size=4)
    become(graph, MHA)
    keep = drawn(*mask) > 0
    keep[(*([0] * (keep.ndim - 1)),)] = False
    inputs = operands(v_size=4)
    (y,) = run(graph, **inputs, keep=keep)
    np.testing.assert_allclose(y, truth(**inputs, keep=keep), atol=2e-6)
    assert not y[0, 0, 0].any()


@pytest.mark.parametrize("mask", MASKS)
def test_additive_masks_of_every_shape_add_and_block(mask: tuple[int | str, ...]) -> None:
    graph = attention(mask, bool_mask=False)
    become(graph, MHA)
    bias = drawn(*mask)
    bias[bias < -0.5] = -np.inf
    bias[(*([0] * (bias.ndim - 1)),)] = -np.inf
    inputs = operands()
    (y,) = run(graph, **inputs, bias=bias)
    np.testing.assert_allclose(y, truth(**inputs, bias=bias), atol=2e-6)


@pytest.mark.parametrize(("number", "expected"), [(-np.inf, 0.0), (np.finfo("f4").min, 1.5)])
@pytest.mark.parametrize("heads", [1, 2])
def test_rows_blocked_by_an_additive_mask_get_what_pytorch_gives(
    number: float, expected: float, heads: int
) -> None:
    """0 for -inf; the mean of the values 0, 1, 2, 3 for the most negative number."""
    graph = attention((1, heads, "S", "T"), bool_mask=False, size=1, v_size=1)
    become(graph, MHA)
    zero = np.zeros((1, 2, 4, 1), np.float32)
    v = zero + np.arange(4, dtype=np.float32).reshape(4, 1)
    bias = np.zeros((1, heads, 4, 4), np.float32)
    bias[..., 0, :], bias[..., 1, 2:] = number, number
    (y,) = run(graph, q=zero, k=zero, v=v, bias=bias)
    assert y[0, 0].ravel().tolist() == pytest.approx([expected, 0.5, 1.5, 1.5])
    np.testing.assert_array_equal(y[0, 0], y[0, 1])


@pytest.mark.parametrize(("blocks", "expected"), [(False, 1.0), (True, 2.0)])
def test_a_mask_with_holes_keeps_its_holes_in_either_polarity(
    blocks: bool, expected: float
) -> None:
    """Values 0, 1, 2, 3 and the mask 1, 0, 1, 0: the mean of 0 and 2, or of 1 and 3."""
    nodes = [node("Not", "block", "mask")] if blocks else []
    name = "block" if blocks else "keep"
    inputs = {"q": ("B", 1, "S", 1), "k": ("B", 1, "T", 1), "v": ("B", 1, "T", 1)}
    made = node("Attention", f"q k v {'mask' if blocks else name}", "y")
    graph = model({**inputs, name: ("B", 1, 1, "T")}, [*nodes, made], {"y": ("B", 1, "S", 1)})
    become(graph, MHA)
    zero = np.zeros((2, 1, 4, 1), np.float32)
    v = zero + np.arange(4, dtype=np.float32).reshape(4, 1)
    mask = np.array([[1, 0, 1, 0]] * 2, bool).reshape(2, 1, 1, 4)
    (y,) = run(graph, q=zero, k=zero, v=v, **{name: mask})
    np.testing.assert_allclose(y, np.full((2, 1, 4, 1), expected), atol=1e-6)


def test_constant_and_finite_masks_need_no_repair() -> None:
    """A relative bias of weights blocks nothing, so nothing but the op is added."""
    inputs = {"q": ("B", 2, 3, 8), "k": ("B", 2, 4, 8), "v": ("B", 2, 4, 8)}
    bias = drawn(1, 2, 3, 4)
    made = node("Attention", "q k v bias", "y")
    graph = model(inputs, [made], {"y": ("B", 2, 3, 8)}, {"bias": bias})
    become(graph, MHA, [{"B": 3}])
    assert not {"Where", "Max", "Expand"} & {n.op_type for n in graph.graph}


@pytest.mark.parametrize(("number", "repaired"), [(-np.inf, False), (np.finfo("f4").min, True)])
def test_a_mask_of_shifted_windows_is_repaired_only_where_it_may_hold_the_most_negative_number(
    number: float, repaired: bool
) -> None:
    """A constant choice between a bias and what blocks, repeated for each image of the batch."""
    inputs = dict.fromkeys("qkv", ("B", 2, 4, 8))
    apart = np.triu(np.ones((1, 1, 4, 4), bool), 1)
    nodes = [
        node("Shape", "q", "rows", start=0, end=1),
        node("Concat", "rows one one one", "wide", axis=0),
        node("Where", "apart number bias", "window"),
        node("Expand", "window wide", "mask"),
        node("Attention", "q k v mask", "y"),
    ]
    constants = {
        "one": np.ones(1, np.int64), "apart": apart, "number": np.array(number, np.float32),
        "bias": drawn(1, 2, 4, 4),
    }  # fmt: skip
    graph = model(inputs, nodes, {"y": ("B", 2, 4, 8)}, constants)
    become(graph, "ai.onnx.Attention", [{"B": 3}])
    assert ("Max" in {n.op_type for n in graph.graph}) == repaired
    q, k, v = (
        drawn(3, 2, 4, 8),
        drawn(2, 3, 4, 8).swapaxes(0, 1),
        drawn(6, 4, 8).reshape(3, 2, 4, 8),
    )
    (y,) = run(graph, q=q, k=k, v=v)
    np.testing.assert_allclose(y, truth(q, k, v, keep=~apart, bias=constants["bias"]), atol=2e-6)


@pytest.mark.parametrize("kind", ["keep", "bias"])
def test_packed_attention_takes_masks_too(kind: str) -> None:
    model_ = seeded(m.Masked)
    mask = torch.rand(2, 1, 5, 5) > 0.4
    inputs = {"x": torch.randn(2, 5, m.D), "mask": mask if kind == "keep" else mask.float()}
    dynamic = {"x": {0: BATCH, 1: TOKENS}, "mask": {0: BATCH, 2: TOKENS, 3: TOKENS}}
    graph = to_onnx(ExportSpec(model_, inputs, dynamic, ("y",)))
    (site,) = find(graph.model)
    apply(graph.model, BUILDERS[CONTRIB](site), [{"batch": 3, "tokens": 7}])
    x, mask = torch.randn(3, 9, m.D), torch.rand(3, 1, 9, 9) > 0.5
    mask[0, 0, 2] = False
    given = mask if kind == "keep" else torch.where(mask, 0.3, -torch.inf)
    expected = model_(x, given).detach()
    np.testing.assert_allclose(run_module(graph.model, x=x, mask=given), expected, atol=3e-6)


def test_the_user_may_force_the_packed_op_on_a_masked_site() -> None:
    inputs = {"x": torch.randn(2, 5, m.D), "mask": torch.ones(5, 5) > 0}
    graph = to_onnx(ExportSpec(seeded(m.Masked), inputs, {"x": {0: BATCH}}, ("y",)))
    (outcome,) = lower(graph.model, "ort-cpu", [{"batch": 3}], "contrib").outcomes
    assert (outcome.lowering, outcome.blocked_rows) == (CONTRIB, "same")
    assert CONTRIB in op_types(graph.model)


def test_a_causal_flag_beside_a_mask_is_left_to_the_standard_op() -> None:
    graph = attention(("S", "T"), is_causal=1)
    with pytest.raises(Exception, match="a mask beside its causal flag"):
        become(graph, MHA)


def test_a_causal_mask_over_more_keys_than_queries_is_refused() -> None:
    """The CPU kernel leaves the last query unmasked there."""
    with pytest.raises(Exception, match="not aligned"):
        become(attention(is_causal=1), MHA)


def test_a_causal_mask_over_as_many_keys_is_taken() -> None:
    graph = attention(is_causal=1, tokens="S", size=1, v_size=1)
    assert become(graph, MHA).attributes["unidirectional"].as_int() == 1
    zero = np.zeros((1, 2, 4, 1), np.float32)
    v = zero + np.arange(4, dtype=np.float32).reshape(4, 1)
    (y,) = run(graph, q=zero, k=zero, v=v)
    assert y[0, 1].ravel().tolist() == pytest.approx([0, 0.5, 1, 1.5])
