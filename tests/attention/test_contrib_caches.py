"""Caches: past keys and values go in, present ones come out, past first and new last."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.lowering import BUILDERS
from attn_export.attention.reasons import NotLowerable
from attn_export.attention.site import Site
from tests.attention.plain import Shape, become, model, node, run, truth

MHA, STANDARD = "com.microsoft.MultiHeadAttention", "ai.onnx.Attention"
SIZES = [{"B": 3, "S": 2, "P": 4}, {"B": 1, "S": 1, "P": 0}, {"B": 2, "S": 3, "P": 1}]


def joined(
    mask: Shape | None = None, heads: int = 2, kv_heads: int = 2, tokens: int | str = "S",
    size: int = 8,
) -> ir.Model:  # fmt: skip
    """Keys and values joined with past ones in front of the node, both results of the graph."""
    inputs: dict[str, Shape] = {
        "q": ("B", heads, tokens, size),
        "k": ("B", kv_heads, tokens, size),
        "v": ("B", kv_heads, tokens, size),
        "past_k": ("B", kv_heads, "P", size),
        "past_v": ("B", kv_heads, "P", size),
    }
    if mask is not None:
        inputs["keep"] = mask
    nodes = [
        node("Concat", "past_k k", "present_k", axis=2),
        node("Concat", "past_v v", "present_v", axis=-2),
        node("Attention", "q present_k present_v" + (" keep" if mask else ""), "y"),
    ]
    new = f"P + {tokens}"
    outputs: dict[str, Shape] = {
        "y": ("B", heads, tokens, size),
        "present_k": ("B", kv_heads, new, size),
        "present_v": ("B", kv_heads, new, size),
    }
    return model(inputs, nodes, outputs)


def drawn(batch: int, past: int, tokens: int, heads: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(past)
    shapes = {
        "q": (batch, heads, tokens, 8), "k": (batch, 2, tokens, 8), "v": (batch, 2, tokens, 8),
        "past_k": (batch, 2, past, 8), "past_v": (batch, 2, past, 8),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


def check(graph: ir.Model, inputs: dict[str, np.ndarray], keep: np.ndarray | None = None) -> None:
    given = inputs if keep is None else {**inputs, "keep": keep}
    y, present_k, present_v = run(graph, **given)
    keys = np.concatenate([inputs["past_k"], inputs["k"]], 2)
    values = np.concatenate([inputs["past_v"], inputs["v"]], 2)
    np.testing.assert_array_equal(present_k, keys)
    np.testing.assert_array_equal(present_v, values)
    np.testing.assert_allclose(y, truth(inputs["q"], keys, values, keep), atol=2e-6)


@pytest.mark.parametrize(("batch", "past", "tokens"), [(3, 4, 2), (1, 0, 3), (2, 5, 1)])
def test_multi_head_attention_extends_a_cache(batch: int, past: int, tokens: int) -> None:
    graph = joined()
    fused = become(graph, MHA, SIZES)
    assert len(fused.outputs) == 3
    assert "Concat" not in {n.op_type for n in graph.graph}
    check(graph, drawn(batch, past, tokens))


@pytest.mark.parametrize("mask", [("B", 1, 1, "P + S"), ("B", 1, "S", "P + S")])
def test_a_mask_covers_past_and_new_keys(mask: Shape) -> None:
    graph = joined(mask)
    become(graph, MHA, SIZES)
    keep = np.random.default_rng(0).random((3, 1, 1 if mask[2] == 1 else 2, 6)) > 0.4
    keep[1, 0, 0] = False
    check(graph, drawn(3, 4, 2), keep)


def test_what_reads_a_present_key_in_front_of_the_site_still_reads_it() -> None:
    """A mask made from the number of keys so far would else be computed from the node it masks."""
    inputs: dict[str, Shape] = dict.fromkeys("qkv", ("B", 2, "S", 8))
    inputs |= {"past_k": ("B", 2, "P", 8), "past_v": ("B", 2, "P", 8)}
    nodes = [
        node("Concat", "past_k k", "present_k", axis=2),
        node("Concat", "past_v v", "present_v", axis=2),
        node("Shape", "present_k", "total", start=2, end=3),
        node("Squeeze", "total", "end"),
        node("Range", "zero end one", "positions"),
        node("Less", "positions end", "keep"),
        node("Unsqueeze", "keep axes", "mask"),
        node("Attention", "q present_k present_v mask", "y"),
        node("Neg", "present_k", "negative"),
    ]
    constants = {"zero": np.array(0), "one": np.array(1), "axes": np.array([0])}
    shape = ("B", 2, "P + S", 8)
    outputs = {
        "y": ("B", 2, "S", 8), "present_k": shape, "present_v": shape, "negative": shape
    }  # fmt: skip
    graph = model(inputs, nodes, outputs, constants)
    become(graph, MHA, SIZES)
    given = drawn(3, 4, 2)
    y, present_k, present_v, negative = run(graph, **given)
    np.testing.assert_array_equal(negative, -present_k)
    np.testing.assert_allclose(y, truth(given["q"], present_k, present_v), atol=2e-6)


@pytest.mark.parametrize("op", [MHA, STANDARD])
def test_the_caches_of_a_standard_node_are_kept(op: str) -> None:
    """Causal queries are counted from the end of the past."""
    inputs: dict[str, Shape] = dict.fromkeys("qkv", ("B", 2, "S", 8))
    inputs |= {"past_k": ("B", 2, "P", 8), "past_v": ("B", 2, "P", 8)}
    made = node("Attention", "q k v - past_k past_v", "y present_k present_v", is_causal=1)
    shape = ("B", 2, "P + S", 8)
    graph = model(
        inputs, [made], {"y": ("B", 2, "S", 8), "present_k": shape, "present_v": shape}
    )  # fmt: skip
    become(graph, op, SIZES)
    given = drawn(2, 3, 2)
    y, present_k, present_v = run(graph, **given)
    keep = np.tril(np.ones((2, 5), bool), k=3)
    np.testing.assert_allclose(y, truth(given["q"], present_k, present_v, keep), atol=2e-6)


def _past_values_as_keys(rewrite: Rewrite) -> None:
    fused = rewrite.also[0][1].producer()
    assert fused is not None
    fused.replace_input_with(6, fused.inputs[7])


def _no_past(rewrite: Rewrite) -> None:
    fused = rewrite.also[0][1].producer()
    assert fused is not None
    fused.replace_input_with(6, None)
    fused.replace_input_with(7, None)


def _presents_swapped(rewrite: Rewrite) -> None:
    (old_key, new_key), (old_value, new_value) = rewrite.also
    rewrite.also = [(old_key, new_value), (old_value, new_key)]


@pytest.mark.parametrize("fault", [_past_values_as_keys, _no_past, _presents_swapped])
def test_a_wrong_cache_is_not_applied(
    fault: Callable[[Rewrite], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = BUILDERS[MHA]

    def wrong(site: Site) -> Rewrite:
        rewrite = build(site)
        fault(rewrite)
        return rewrite

    monkeypatch.setitem(BUILDERS, MHA, wrong)
    graph = joined()
    with pytest.raises(NotLowerable, match="differs"):
        become(graph, MHA, SIZES)
    assert MHA.split(".")[-1] not in {n.op_type for n in graph.graph}


def test_keys_that_nobody_keeps_are_no_cache() -> None:
    graph = joined()
    graph.graph.outputs.pop()
    graph.graph.outputs.pop()
    assert len(become(graph, MHA, SIZES).outputs) == 1
