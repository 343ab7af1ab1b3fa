"""com.microsoft GroupQueryAttention: only for causal sites, heads repeated, windows exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from attn_export.attention.apply import apply
from attn_export.attention.lower import group_query_attention
from attn_export.attention.lowering import lower
from attn_export.attention.reasons import NotLowerable, Reason
from tests.attention.plain import Shape, attention, become, model, node, run, site_of, truth
from tests.attention.test_contrib_caches import check, drawn, joined

GQA = group_query_attention.NAME
SIZES = [{"B": 3, "S": 7}, {"B": 1, "S": 1}, {"B": 2, "S": 4}]


def grouped(**attributes: object) -> ir.Model:
    """Four query heads over two of keys and values."""
    return attention(heads=4, kv_heads=2, tokens="S", **attributes)


def index_values(batch: int, kv_heads: int, tokens: int) -> np.ndarray:
    """V is the index of its token, in every element."""
    index = np.arange(tokens, dtype=np.float32).reshape(tokens, 1)
    return np.broadcast_to(index, (batch, kv_heads, tokens, 8)).copy()


def test_causal_grouped_heads_become_one_node() -> None:
    graph = grouped(is_causal=1, scale=0.7)
    become(graph, GQA, SIZES)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 4, 9, 8)).astype("f4")
    k, v = (rng.standard_normal((3, 2, 9, 8)).astype("f4") for _ in "kv")
    (y,) = run(graph, q=q, k=k, v=v)
    keep = np.tril(np.ones((9, 9), bool))
    np.testing.assert_allclose(y, truth(q, k, v, keep, scale=0.7), atol=2e-6)


def test_query_heads_share_a_key_head_with_their_neighbours() -> None:
    """Values filled with h + 1 in key head h: 1, 1, 2, 2 and not 1, 2, 1, 2."""
    graph = grouped(is_causal=1)
    become(graph, GQA, SIZES)
    v = np.ones((1, 2, 3, 8), np.float32) * np.array([1, 2], np.float32).reshape(1, 2, 1, 1)
    zero = np.zeros((1, 4, 3, 8), np.float32)
    (y,) = run(graph, q=zero, k=zero[:, :2], v=v)
    assert y[0, :, 0, 0].tolist() == pytest.approx([1, 1, 2, 2])


def test_softcap_is_applied() -> None:
    graph = grouped(is_causal=1, softcap=2.0)
    become(graph, GQA, SIZES)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 5, 8)).astype("f4") * 3 for n in (4, 2, 2))
    (y,) = run(graph, q=q, k=k, v=v)
    keep = np.tril(np.ones((5, 5), bool))
    np.testing.assert_allclose(y, truth(q, k, v, keep, softcap=2.0), atol=5e-6)


def test_attention_to_later_keys_never_becomes_a_causal_op() -> None:
    """Query 0 must see all keys: 1.5, not 0."""
    with pytest.raises(NotLowerable, match="always causal") as refused:
        become(grouped(), GQA, SIZES)
    assert refused.value.reason == Reason.CAUSAL
    graph = grouped()
    (outcome,) = lower(graph, "ort-cpu", SIZES).outcomes
    assert outcome.lowering == "ai.onnx.Attention"
    zero = np.zeros((1, 4, 4, 8), np.float32)
    (y,) = run(graph, q=zero, k=zero[:, :2], v=index_values(1, 2, 4))
    assert y[0, :, 0, 0].tolist() == pytest.approx([1.5] * 4)


def window_graph() -> ir.Model:
    """A causal window of 2 as a mask made from sizes: key j for i - 2 < j <= i."""
    inputs: dict[str, Shape] = {
        "q": ("B", 4, "S", 8), "k": ("B", 2, "S", 8), "v": ("B", 2, "S", 8)
    }  # fmt: skip
    nodes = [
        node("Shape", "q", "size", start=2, end=3),
        node("Squeeze", "size", "end"),
        node("Range", "zero end one", "keys"),
        node("Unsqueeze", "keys last", "queries"),
        node("Sub", "queries keys", "distance"),
        node("GreaterOrEqual", "distance zero", "earlier"),
        node("Less", "distance two", "near"),
        node("And", "earlier near", "mask"),
        node("Attention", "q k v mask", "y"),
    ]
    numbers = {"zero": np.array(0), "one": np.array(1), "two": np.array(2), "last": np.array([1])}
    return model(inputs, nodes, {"y": ("B", 4, "S", 8)}, numbers)


def windowed(window: int) -> ir.Model:
    graph = window_graph()
    site = replace(site_of(graph), causal="upper-left", window=window)
    apply(graph, group_query_attention.build(site), SIZES)
    return graph


def test_a_window_counts_the_query_itself() -> None:
    """Values 0, 1, 2, 3 and a window of 2: 0, 0.5, 1.5, 2.5."""
    graph = windowed(2)
    zero = np.zeros((2, 4, 4, 8), np.float32)
    results = dict(zip([v.name for v in graph.graph.outputs], run(graph, q=zero, k=zero[:, :2],
                   v=index_values(2, 2, 4)), strict=True))  # fmt: skip
    assert results["y"][1, 3, :, 0].tolist() == pytest.approx([0, 0.5, 1.5, 2.5])


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_that_is_off_by_one_is_not_applied(window: int) -> None:
    with pytest.raises(NotLowerable, match="differs"):
        windowed(window)


def test_one_new_token_extends_a_cache_at_any_batch() -> None:
    graph = joined(heads=4, tokens=1)
    site = replace(site_of(graph), causal="lower-right")
    sizes = [{"B": 3, "P": 4}, {"B": 1, "P": 0}]
    apply(graph, group_query_attention.build(site), sizes)
    for past in (0, 5):
        check(graph, drawn(3, past, 1, heads=4))


def test_several_new_tokens_beside_a_cache_are_refused() -> None:
    """The CPU kernel takes them at batch 1 alone."""
    site = replace(site_of(joined(heads=4)), causal="lower-right")
    with pytest.raises(NotLowerable, match="several new tokens"):
        group_query_attention.build(site)


def test_padding_beside_causality_becomes_a_bias_and_blocked_rows_are_zero() -> None:
    inputs: dict[str, Shape] = {
        "q": ("B", 4, "S", 8), "k": ("B", 2, "S", 8), "v": ("B", 2, "S", 8),
        "keep": ("B", 1, "S", "S"),
    }  # fmt: skip
    nodes = [
        node("Cast", "keep", "numbers", to=1),
        node("Trilu", "numbers", "lower", upper=0),
        node("Cast", "lower", "mask", to=9),
        node("Attention", "q k v mask", "y"),
    ]
    graph = model(inputs, nodes, {"y": ("B", 4, "S", 8)})
    site = replace(site_of(graph), causal="upper-left")
    apply(graph, group_query_attention.build(site), SIZES)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, n, 5, 8)).astype("f4") for n in (4, 2, 2))
    keep = rng.random((3, 1, 5, 5)) > 0.4
    keep[1, 0, 2] = False
    (y,) = run(graph, q=q, k=k, v=v, keep=keep)
    np.testing.assert_allclose(y, truth(q, k, v, np.tril(keep)), atol=2e-6)
    assert not y[1, :, 2].any()


def test_key_heads_in_tiled_order_are_not_applied() -> None:
    """Query head n would read key head n mod 2."""
    graph = grouped(is_causal=1)
    rewrite = group_query_attention.build(site_of(graph))
    reshape = next(n for n in rewrite.nodes if n.op_type == "Reshape")
    transpose = reshape.inputs[0].producer() if reshape.inputs[0] is not None else None
    assert transpose is not None
    order = ir.val("order", const_value=ir.tensor(np.array([0, 2, 1, 3])))
    swap = ir.node("Gather", [transpose.outputs[0], order], attributes={"axis": 2})
    swap.name = "swap"
    reshape.replace_input_with(0, swap.outputs[0])
    rewrite.nodes.insert(rewrite.nodes.index(reshape), swap)
    rewrite.weights.append(order)
    with pytest.raises(NotLowerable, match="differs"):
        apply(graph, rewrite, SIZES)


@pytest.mark.parametrize("attribute", ["kv_num_heads", "scale", "softcap"])
def test_a_wrong_attribute_is_not_applied(attribute: str) -> None:
    graph = grouped(is_causal=1)
    rewrite = group_query_attention.build(site_of(graph))
    fused = next(n for n in rewrite.nodes if n.op_type == "GroupQueryAttention")
    value = {"kv_num_heads": 4, "scale": 0.5, "softcap": 1.0}[attribute]
    make = ir.AttrInt64 if isinstance(value, int) else ir.AttrFloat32
    fused.attributes[attribute] = make(attribute, value)
    with pytest.raises(NotLowerable):
        apply(graph, rewrite, SIZES)
