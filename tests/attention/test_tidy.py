"""No layout nodes are left around a lowered site that it does not need."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn

from attn_export.attention.apply import apply, drop_unused_initializers
from attn_export.attention.find import find
from attn_export.attention.lowering import BUILDERS
from attn_export.exporting.exporter import Graph, to_onnx
from attn_export.models.spec import ExportSpec
from tests.attention import modules as m
from tests.attention.graphs import BATCH, CONTEXT, SIZES, TOKENS, exported, op_types, run, seeded

CONTRIB, MHA = "com.microsoft.Attention", "com.microsoft.MultiHeadAttention"
STANDARD = "ai.onnx.Attention"
MOVES = ("ai.onnx.Transpose", "ai.onnx.Gather", "ai.onnx.Split", "ai.onnx.Squeeze")


class Torch(nn.Module):
    """nn.MultiheadAttention, whose three projections are one weight."""

    def __init__(self, batch_first: bool = True, **arguments: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(m.D, m.N, batch_first=batch_first, **arguments)
        for weight in self.attention.parameters():
            nn.init.normal_(weight, std=0.3)


class Self(Torch):
    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Cross(Torch):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.attention(x, context, context, need_weights=False)[0]


class Apart(Torch):
    """Queries and keys carry positions, values do not, as in DETR."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x + 1, x + 1, x, need_weights=False)[0]


def sequence_first(module: nn.Module, **inputs: Tensor) -> Graph:
    dynamic = {"x": {0: TOKENS, 1: BATCH}, "context": {0: CONTEXT, 1: BATCH}}
    kept = {name: dynamic[name] for name in inputs}
    return to_onnx(ExportSpec(module, inputs, kept, ("y",)))


def lowered(graph: Graph, op: str) -> Counter[str]:
    (site,) = find(graph.model)
    apply(graph.model, BUILDERS[op](site), SIZES)
    RemoveUnusedNodesPass()(graph.model)
    drop_unused_initializers(graph.model)
    return Counter(op_types(graph.model))


def check(graph: Graph, model: nn.Module, *inputs: Tensor) -> None:
    names = ("x", "context")[: len(inputs)]
    result = run(graph.model, **dict(zip(names, inputs, strict=True)))
    np.testing.assert_allclose(result, model(*inputs).detach(), atol=5e-6)


def test_torch_self_attention_becomes_one_packed_node_and_its_projection() -> None:
    """Its tokens lie before the batch between two Transposes, which both go."""
    model = seeded(Self)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    left = lowered(graph, CONTRIB)
    assert not [op for op in MOVES if left[op]]
    check(graph, model, torch.randn(3, 9, m.D))
    weights = sum(v.const_value.size for v in graph.model.graph.initializers.values())
    assert weights < 4 * m.D * m.D + 4 * m.D + 20  # the merged weight alone, not the old one too


@pytest.mark.parametrize("module", [Cross, Apart])
def test_torch_attention_over_different_values_needs_no_transpose(module: type[nn.Module]) -> None:
    model = seeded(module)
    inputs = [torch.randn(2, 5, m.D)]
    if module is Cross:
        inputs.append(torch.randn(2, 3, m.D))
    graph = exported(model, **dict(zip(("x", "context"), inputs, strict=False)))
    left = lowered(graph, MHA)
    assert not [op for op in MOVES if left[op]]
    check(graph, model, *(torch.randn(3, 4 + i, m.D) for i in range(len(inputs))))


@pytest.mark.parametrize(("module", "op", "most"), [
    (Self, CONTRIB, 2), (Self, MHA, 2), (Self, STANDARD, 4), (Cross, MHA, 3),
])  # fmt: skip
def test_tokens_before_the_batch_cost_few_transposes(
    module: type[nn.Module], op: str, most: int
) -> None:
    """One for each value that is read, one for the result."""
    model = seeded(module, batch_first=False)
    inputs = [torch.randn(5, 2, m.D)]
    if module is Cross:
        inputs.append(torch.randn(3, 2, m.D))
    graph = sequence_first(model, **dict(zip(("x", "context"), inputs, strict=False)))
    left = lowered(graph, op)
    assert left["ai.onnx.Transpose"] <= most
    check(graph, model, *(torch.randn(4 + i, 3, m.D) for i in range(len(inputs))))


@pytest.mark.parametrize("module", [m.Unbind, m.Chunk, m.Indexed, m.Separate])
def test_standard_attention_takes_tokens_before_heads(module: type[nn.Module]) -> None:
    model = seeded(module)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    left = lowered(graph, STANDARD)
    assert not left["ai.onnx.Transpose"]
    assert not left["ai.onnx.Reshape"]
    node = next(n for n in graph.model.graph if n.op_type == "Attention")
    assert node.attributes["q_num_heads"].as_int() == m.N
    check(graph, model, torch.randn(3, 9, m.D))


def test_normalised_queries_are_moved_once() -> None:
    """MultiHeadAttention wants tokens before heads; keys and values are projected so."""
    model = seeded(m.QueryNorm)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    left = lowered(graph, MHA)
    assert left["ai.onnx.Transpose"] == 2  # to the heads for the norm, and back
    check(graph, model, torch.randn(3, 9, m.D))


@pytest.mark.parametrize("op", [MHA, STANDARD])
def test_heads_that_are_not_merged_stay_apart(op: str) -> None:
    model = seeded(m.Unmerged)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    lowered(graph, op)
    check(graph, model, torch.randn(3, 9, m.D))


def test_a_transpose_and_its_inverse_in_front_of_the_standard_op_go() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.reshape(x.shape[0], 4, -1, 6).transpose(1, 3).contiguous().transpose(1, 3)
            return nn.functional.scaled_dot_product_attention(q * 1.0, q, q)

    model = Turned().eval()
    graph = to_onnx(ExportSpec(model, {"x": torch.randn(2, 4, 30)}, {"x": {0: BATCH}}, ("y",)))
    left = lowered(graph, STANDARD)
    assert left["ai.onnx.Transpose"] <= 2  # those of the query, which is no layout of x
    check(graph, model, torch.randn(3, 4, 30))
