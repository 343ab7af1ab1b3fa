"""Queries that are weights, as a DETR decoder's: its first self-attention depends on no input."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.attention.lowering import lower
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import ExportSpec
from attn_export.parity.drawing import sizes_of
from attn_export.runtimes import ort_cpu


class Decoder(nn.Module):
    """Queries (S, D) attend to each other and then to memory (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, 16))
        self.own, self.cross = nn.Linear(16, 48), nn.Linear(16, 48)

    def forward(self, memory: Tensor) -> Tensor:
        x = self.queries.expand(memory.shape[0], -1, -1)
        x = x + attend(*self.own(x).chunk(3, -1))
        _, key, value = self.cross(memory).chunk(3, -1)
        return attend(self.cross(x).chunk(3, -1)[0], key, value)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_attention_of_learned_queries_is_lowered_and_so_is_what_follows_it() -> None:
    torch.manual_seed(0)
    module, memory = Decoder().eval(), torch.randn(3, 7, 16)
    graph = to_onnx(ExportSpec(module, {"memory": memory[:2]}))
    account = lower(graph.model, "ort-cpu", sizes_of(graph.spec))
    assert [outcome.status for outcome in account.outcomes] == ["lowered", "lowered"]
    with ort_cpu.load(ir.to_proto(graph.model).SerializeToString()) as session:
        (answer,) = session.run({"memory": memory.numpy()}).values()
    np.testing.assert_allclose(answer, module(memory).detach().numpy(), atol=1e-5)
