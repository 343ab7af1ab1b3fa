"""Graphs that PyTorch's exporter writes and ONNX Runtime refuses when it runs them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import Axis, ExportSpec


class Rotary(nn.Module):
    """Angles of the positions alone, (1, S, H), as Llama computes them."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = 1.0 / 100.0 ** (torch.arange(half) / half)
        angles = torch.arange(x.shape[2])[None, :, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * cos + turned * sin


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_rotary_embedding_runs_at_every_batch(batch: int) -> None:
    dynamic = {"x": {0: Axis("batch", 1, 8), 2: Axis("tokens", 1, 32)}}
    graph = to_onnx(ExportSpec(Rotary().eval(), {"x": torch.randn(2, 2, 5, 8)}, dynamic))
    assert "RotaryEmbedding" in {node.op_type for node in graph.model.graph}
    session = ort.InferenceSession(
        ir.to_proto(graph.model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x = torch.zeros(batch, 2, 3, 8)
    x[..., 0] = 1.0  # turned by its position: (cos p, ..., sin p, ...)
    (turned,) = session.run(None, {"x": x.numpy()})
    for position in range(3):
        expected = [np.cos(position), 0, 0, 0, np.sin(position), 0, 0, 0]
        np.testing.assert_allclose(
            turned[:, :, position], np.tile(expected, (batch, 2, 1)), atol=1e-6
        )
