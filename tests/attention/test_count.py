"""What counts as attention, decided without the finder."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import nn

from attn_export.attention.count import count, others
from attn_export.attention.data import depends_on_input
from attn_export.attention.lowering import lower
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import ExportSpec
from attn_export.parity.drawing import sizes_of
from tests.attention import modules as m
from tests.attention.graphs import SIZES, exported, seeded


@pytest.mark.parametrize(("module", "expected"), [
    (m.Unbind, 1), (m.ByHand, 1), (m.ExpOverSum, 1), (m.Classifier, 0), (m.FixedBins, 0),
])  # fmt: skip
def test_a_softmax_counts_where_it_weighs_values(module: type[nn.Module], expected: int) -> None:
    graph = exported(seeded(module), x=torch.randn(2, 5, m.D))
    assert len(count(graph.model)) == expected


def test_two_blocks_count_twice_before_and_after_lowering() -> None:
    graph = exported(nn.Sequential(seeded(m.Unbind), seeded(m.Chunk)), input=torch.randn(2, 5, m.D))
    assert len(count(graph.model)) == 2
    lower(graph.model, "ort-cpu", sizes_of(graph.spec))
    assert len(count(graph.model)) == 2


class TalkingHeads(m.Block):
    """CaiT: heads are mixed before and behind the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(m.N, m.N), nn.Conv2d(m.N, m.N, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        scores = self.before((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return m.merge_heads(self.behind(scores.softmax(-1)) @ v)


class MixedByEinsum(TalkingHeads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        weights = torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(-1), self.before.weight)
        return torch.einsum("bhij,bhjd->bihd", weights, v)


@pytest.mark.parametrize("module", [TalkingHeads, MixedByEinsum])
def test_mixing_heads_behind_the_softmax_does_not_hide_attention(module: type[nn.Module]) -> None:
    graph = exported(seeded(module), x=torch.randn(2, 5, m.D))
    assert len(count(graph.model)) == 1


def test_linear_attention_is_listed_apart() -> None:
    class Linear(m.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (m.split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
            return m.merge_heads(q.exp() @ (k.exp().mT @ v))

    graph = exported(seeded(Linear), x=torch.randn(2, 5, m.D))
    assert [entry.partition(":")[0] for entry in others(graph.model)] == ["linear"]
    softmax = exported(seeded(m.ByHand), x=torch.randn(2, 5, m.D))
    assert others(softmax.model) == []


def test_attention_in_a_branch_of_control_flow_counts() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, self.attend, lambda x: x.clone(), (x,))

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.transpose(1, 2)).softmax(-1) @ x

    graph = exported(Branch(), x=torch.randn(2, 5, m.D))
    assert len(count(graph.model)) == 1


def test_what_the_finder_misses_is_listed_as_refused() -> None:
    graph = exported(seeded(m.ByHand), x=torch.randn(2, 5, m.D))
    account = lower(graph.model, "ort-cpu", SIZES).to_json()
    assert account["total"] == account["recognised"] + account["refused"]


def test_gates_over_channels_and_sampled_values_are_listed_apart() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
            grid = torch.zeros(x.shape[0], 2, 2, 2)
            return nn.functional.grid_sample(x * gate, grid, align_corners=False)

    graph = to_onnx(ExportSpec(Gate(), {"x": torch.randn(2, 8, 4, 4)}))
    assert [entry.partition(":")[0] for entry in others(graph.model)] == ["channel", "deformable"]
    assert count(graph.model) == []


def test_a_graph_of_thousands_of_layers_is_counted() -> None:
    """One long chain of values: walks must not recurse once a layer."""
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape([2, 4, 4]))
    nodes, value = [], x
    for index in range(5000):
        node = ir.node("Relu", [value], name=f"relu_{index}")
        value = node.outputs[0]
        value.shape, value.dtype = x.shape, x.dtype
        nodes.append(node)
    weights = ir.node("Softmax", [value], name="softmax")
    weights.outputs[0].shape, weights.outputs[0].dtype = x.shape, x.dtype
    product = ir.node("MatMul", [weights.outputs[0], value])
    product.outputs[0].shape, product.outputs[0].dtype = x.shape, x.dtype
    graph = ir.Graph([x], product.outputs, nodes=[*nodes, weights, product], opset_imports={"": 23})
    model = ir.Model(graph, ir_version=10)
    assert count(model) == ["softmax"]
    assert depends_on_input(product.outputs[0])
