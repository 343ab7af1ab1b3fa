"""A rewrite that computes something else must not be applied."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from onnx import parser

from attn_export.attention import lowering
from attn_export.attention.cutting import evaluate_cut, evaluator
from attn_export.attention.find import find
from attn_export.attention.lower import contrib_attention
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.site import Site
from attn_export.parity.drawing import sizes_of
from tests.attention import modules as m
from tests.attention.graphs import SIZES, exported, op_types, run, seeded


def swap_query_and_key(rewrite: Rewrite) -> None:
    _edit(
        rewrite, 0, lambda w: np.concatenate([w[:, m.D : 2 * m.D], w[:, : m.D], w[:, 2 * m.D :]], 1)
    )


def swap_two_heads(rewrite: Rewrite) -> None:
    def swap(w: np.ndarray) -> np.ndarray:
        w = w.copy()
        w[:, : m.H], w[:, m.H : 2 * m.H] = w[:, m.H : 2 * m.H].copy(), w[:, : m.H].copy()
        return w

    _edit(rewrite, 0, swap)


def forget_the_bias(rewrite: Rewrite) -> None:
    _edit(rewrite, 1, np.zeros_like)


def scale_off_by_one_percent(rewrite: Rewrite) -> None:
    node = rewrite.nodes[0]
    scale = node.attributes["scale"].as_float()
    node.attributes["scale"] = type(node.attributes["scale"])(
        "scale", node.attributes["scale"].type, scale * 1.01
    )


def make_it_causal(rewrite: Rewrite) -> None:
    node = rewrite.nodes[0]
    old = node.attributes["unidirectional"]
    node.attributes["unidirectional"] = type(old)("unidirectional", old.type, 1)


def _edit(rewrite: Rewrite, index: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
    import onnx_ir as ir

    value = rewrite.weights[index]
    assert value.const_value is not None
    array = np.ascontiguousarray(change(value.const_value.numpy()))
    value.const_value = ir.tensor(array, name=value.name)


MUTANTS = [
    swap_query_and_key, swap_two_heads, forget_the_bias, scale_off_by_one_percent, make_it_causal
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_wrong_rewrite_is_not_applied(
    mutate: Callable[[Rewrite], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(site: Site) -> Rewrite:
        rewrite = contrib_attention.build(site)
        mutate(rewrite)
        return rewrite

    monkeypatch.setitem(lowering.BUILDERS, contrib_attention.NAME, build)
    model = seeded(m.Unbind)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    (outcome,) = lowering.lower(graph.model, "ort-cpu", SIZES).outcomes
    assert outcome.lowering == "ai.onnx.Attention"
    assert "com.microsoft.Attention differs" in outcome.reason
    assert "com.microsoft.Attention" not in op_types(graph.model)
    x = torch.randn(3, 9, m.D)
    np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=3e-6)


def test_a_site_like_a_proved_one_is_still_run_with_its_own_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault in packing the second block alone must not escape."""
    built: list[str] = []

    def build(site: Site) -> Rewrite:
        rewrite = contrib_attention.build(site)
        built.append(site.name)
        if len(built) == 2:
            swap_query_and_key(rewrite)
        return rewrite

    monkeypatch.setitem(lowering.BUILDERS, contrib_attention.NAME, build)
    torch.manual_seed(0)
    stack = torch.nn.Sequential(m.Unbind(), m.Unbind(), m.Unbind()).eval()
    graph = exported(stack, input=torch.randn(2, 5, m.D))
    account = lowering.lower(graph.model, "ort-cpu", sizes_of(graph.spec))
    assert [outcome.lowering for outcome in account.outcomes] == [
        "com.microsoft.Attention",
        "ai.onnx.Attention",
        "com.microsoft.Attention",
    ]


def test_sites_of_one_form_share_their_signature() -> None:
    stack = torch.nn.Sequential(seeded(m.Unbind), seeded(m.Chunk), seeded(m.Scaled))
    first, second, third = find(exported(stack, input=torch.randn(2, 5, m.D)).model)
    assert first.signature == second.signature != third.signature


def test_the_evaluator_gathers_from_more_than_64_elements() -> None:
    """out[i, j] = data[i, index[i, j]], with fewer rows of indices than of data."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 23]> g (float[2, 70] x, int64[1, 3] i)'
        " => (float[1, 3] y) { y = GatherElements<axis = 1>(x, i) }"
    )
    data = np.arange(140, dtype=np.float32).reshape(2, 70)
    with evaluator(model) as made:
        (found,) = evaluate_cut(made, {"x": data, "i": np.array([[69, 0, -2]])})
    assert found.tolist() == [[69, 0, 68]]
