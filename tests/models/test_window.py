"""Shifted-window attention against the papers' formulas, position by position in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_export.models.attention.window import WindowAttention


def attention(window: int, shift: int, version: int, fused: bool = True) -> WindowAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = WindowAttention(6, 2, window, shift, version, fused).double()
        torch.nn.init.normal_(module.qkv.bias)
        if version == 1:
            torch.nn.init.normal_(module.table)
        else:
            torch.nn.init.normal_(module.log_scale, mean=2.0)
    return module.eval()


def maps(batch: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(height * 100 + width)
    return torch.randn(batch, height, width, 6, generator=generator, dtype=torch.float64)


def bias_between(module: WindowAttention, down: int, right: int) -> np.ndarray:
    """The bias (N,) for a query that lies `down` rows and `right` columns after its key."""
    M = module.window
    if module.version == 1:
        return module.table.detach().numpy()[(down + M - 1) * (2 * M - 1) + right + M - 1]
    spaced = [
        math.copysign(math.log2(1 + abs(8 * x / max(M - 1, 1))) / math.log2(8), x)
        for x in (down, right)
    ]
    first, _, last = module.bias_mlp
    hidden = np.maximum(first.weight.detach().numpy() @ spaced + first.bias.detach().numpy(), 0)
    return 16 / (1 + np.exp(-(last.weight.detach().numpy() @ hidden)))


def by_loops(module: WindowAttention, x: np.ndarray) -> np.ndarray:
    """One map (height, width, D): each query looks for its keys by itself."""
    height, width, D = x.shape
    M, N, H = module.window, module.heads, D // module.heads
    weight, b = module.qkv.weight.detach().numpy(), module.qkv.bias.detach().numpy()
    out_weight, out_b = module.proj.weight.detach().numpy(), module.proj.bias.detach().numpy()
    sizes = [-(-height // M) * M, -(-width // M) * M]
    shifts = [0 if size == M else module.shift for size in sizes]

    def qkv(i: int, j: int) -> np.ndarray:
        pixel = x[i, j] if i < height and j < width else np.zeros(D)
        return (weight @ pixel + b).reshape(3, N, H)

    out = np.zeros_like(x)
    for i, j in np.ndindex(height, width):
        at = [(p - s) % size for p, s, size in zip((i, j), shifts, sizes, strict=True)]
        scores, values = [], []
        for u, v in np.ndindex(M, M):
            key_at = [at[0] // M * M + u, at[1] // M * M + v]
            if any(
                (p >= size - s) != (k >= size - s)
                for p, k, s, size in zip(at, key_at, shifts, sizes, strict=True)
            ):
                continue  # they only became neighbours by the shift
            q = qkv(i, j)[0]
            _, k, value = qkv(
                (key_at[0] + shifts[0]) % sizes[0], (key_at[1] + shifts[1]) % sizes[1]
            )
            score = (q * k).sum(-1)
            if module.version == 1:
                score = score / math.sqrt(H)
            else:
                score = score / np.linalg.norm(q, axis=-1) / np.linalg.norm(k, axis=-1)
                score = score * np.exp(
                    np.minimum(module.log_scale.detach().numpy().reshape(N), math.log(100))
                )
            scores.append(score + bias_between(module, at[0] - key_at[0], at[1] - key_at[1]))
            values.append(value)
        exp = np.exp(np.array(scores) - np.max(scores, axis=0))  # (keys, N)
        mixed = (exp[:, :, None] * np.array(values)).sum(0) / exp.sum(0)[:, None]
        out[i, j] = out_weight @ mixed.reshape(D) + out_b
    return out


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("size", [(3, 3), (6, 9), (7, 5), (2, 8), (1, 1)])
def test_it_equals_the_formula_at_any_size(version: int, shift: int, size: tuple[int, int]) -> None:
    module = attention(3, shift, version)
    x = maps(1, *size)
    expected = by_loops(module, x[0].numpy())
    atol = 1e-11 if version == 1 else 1e-7  # version 2 keeps its log-spaced offsets in float32
    np.testing.assert_allclose(module(x)[0].detach().numpy(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize(("batch", "height", "width"), [(1, 8, 8), (2, 5, 13), (3, 11, 4)])
def test_fused_and_written_out_agree_and_rows_are_independent(
    version: int, shift: int, batch: int, height: int, width: int
) -> None:
    fused, plain = (attention(4, shift, version, fused) for fused in (True, False))
    x = maps(batch, height, width)
    together = fused(x)
    torch.testing.assert_close(together, plain(x), rtol=0, atol=1e-12)
    for row in range(batch):
        torch.testing.assert_close(
            together[row : row + 1], fused(x[row : row + 1]), rtol=0, atol=1e-12
        )


def test_a_window_of_one_position_returns_its_value() -> None:
    module = attention(1, 0, 1)
    x = maps(2, 3, 4)
    values = module.qkv(x)[..., 12:]
    torch.testing.assert_close(module(x), module.proj(values))


def test_opposite_corners_share_a_window_but_do_not_see_each_other() -> None:
    module = attention(4, 2, 1)
    x = maps(1, 8, 8)
    y = module(x)
    x[0, 0, 0] += 5.0
    changed = (module(x) - y).abs().amax(-1)[0] > 1e-9
    assert changed[:2, :2].all()
    assert changed.sum() == 4  # the corner's own part of its window, 2 by 2


def test_the_temperature_of_version_2_has_a_floor_of_a_hundredth() -> None:
    module = attention(3, 0, 2)
    torch.nn.init.constant_(module.log_scale, math.log(100))
    expected = module(maps(1, 3, 3))
    torch.nn.init.constant_(module.log_scale, 50.0)
    torch.testing.assert_close(module(maps(1, 3, 3)), expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dim": 10, "heads": 4}, "not a multiple of heads"),
        ({"dim": 8, "heads": 4, "window": 4, "shift": 4}, "shift 4 is not in 0..3"),
        ({"dim": 8, "heads": 4, "version": 3}, "neither 1 nor 2"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        WindowAttention(**options)
