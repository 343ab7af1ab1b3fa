"""The detector's attention against its formula in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_export.models.attention.position_sensitive import PositionSensitiveAttention
from attn_export.models.conv import ConvNorm


def attention(dim: int, fused: bool = False) -> PositionSensitiveAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = PositionSensitiveAttention(dim, fused).double()
        for layer in module.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(layer.bias)
                torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
                torch.nn.init.normal_(layer.running_mean)
                torch.nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return module.eval()


def maps(batch: int, dim: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(height * 100 + width)
    return torch.randn(batch, dim, height, width, generator=generator, dtype=torch.float64)


def affine(layer: ConvNorm) -> tuple[np.ndarray, np.ndarray]:
    """The convolution's weight and bias once the normalisation is folded into it."""
    conv, norm = layer
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    weight = conv.weight * scale.reshape(-1, 1, 1, 1)
    return weight.detach().numpy(), (norm.bias - norm.running_mean * scale).detach().numpy()


def by_loops(module: PositionSensitiveAttention, x: np.ndarray) -> np.ndarray:
    D, height, width = x.shape
    weight, bias = affine(module.qkv)
    qkv = np.einsum("ed,dhw->ehw", weight[:, :, 0, 0], x) + bias[:, None, None]
    depthwise, depthwise_bias = affine(module.positions)
    out = np.zeros_like(x)
    cells = list(np.ndindex(height, width))
    for head in range(D // 64):
        start = head * 128
        q, k, v = np.split(qkv[start : start + 128], [32, 64])
        for i, j in cells:
            scores = np.array([q[:, i, j] @ k[:, a, b] / math.sqrt(32) for a, b in cells])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed = sum(w * v[:, a, b] for w, (a, b) in zip(weights, cells, strict=True))
            near = np.zeros(64)
            for a in range(max(i - 1, 0), min(i + 2, height)):
                for b in range(max(j - 1, 0), min(j + 2, width)):
                    taps = depthwise[head * 64 : head * 64 + 64, 0, a - i + 1, b - j + 1]
                    near += taps * v[:, a, b]
            out[head * 64 : head * 64 + 64, i, j] = mixed + near
    out += depthwise_bias[:, None, None]
    weight, bias = affine(module.proj)
    return np.einsum("ed,dhw->ehw", weight[:, :, 0, 0], out) + bias[:, None, None]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("dim", "size"), [(64, (1, 1)), (128, (3, 4)), (64, (5, 2))])
def test_it_equals_the_formula(fused: bool, dim: int, size: tuple[int, int]) -> None:
    module = attention(dim, fused)
    x = maps(1, dim, *size)
    expected = by_loops(module, x[0].numpy())
    np.testing.assert_allclose(module(x)[0].detach().numpy(), expected, atol=1e-11)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("batch", "height", "width"), [(2, 4, 7), (3, 6, 3)])
def test_each_row_of_a_batch_equals_its_own_run(
    fused: bool, batch: int, height: int, width: int
) -> None:
    module = attention(128, fused)
    x = maps(batch, 128, height, width)
    together = module(x)
    for row in range(batch):
        alone = module(x[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-12)


def test_a_head_for_each_64_channels_and_keys_of_half_its_size() -> None:
    module = attention(192)
    assert (module.heads, module.key_size) == (3, 32)
    assert module.qkv[0].out_channels == 3 * (32 + 32 + 64)


@pytest.mark.parametrize("dim", [0, 32, 100])
def test_other_widths_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"dim {dim} is not a positive multiple"):
        PositionSensitiveAttention(dim)
