"""Causal attention with a cache: values by hand, loops in double, and one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_export.models.attention.causal_cache import (
    CausalCacheAttention,
    CausalCacheConfig,
    grouped_attention,
    token_positions,
    visible_keys,
)
from attn_export.models.attention.rotary import rotary_angles, rotate

THETA = 100.0


def attention(heads: int = 4, kv_heads: int = 2, fused: bool = True) -> CausalCacheAttention:
    torch.manual_seed(0)
    return CausalCacheAttention(CausalCacheConfig(32, heads, kv_heads, fused=fused)).double()


def step(
    module: CausalCacheAttention,
    x: Tensor,
    mask: Tensor,
    window: int | None,
    past: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over new tokens x; the mask covers the past too."""
    S = x.shape[1]
    positions = token_positions(mask, S).unsqueeze(1)
    angles = rotary_angles(positions, module.config.head_size, THETA, x.dtype)
    out: tuple[Tensor, Tensor, Tensor] = module(x, visible_keys(mask, S, window), angles, *past)
    return out


def loops(
    module: CausalCacheAttention, x: Tensor, mask: list[bool], window: int | None
) -> list[list[float]]:
    """One sentence (S, D), from the definition, with plain Python numbers."""
    N, K, H = module.config.heads, module.config.kv_heads, module.config.head_size
    q, k, v = ((x @ m.weight.T).tolist() for m in (module.query, module.key, module.value))
    positions, seen = [], 0
    for real in mask:
        seen += real
        positions.append(max(seen - 1, 0))

    def turned(row: list[float], head: int, position: int) -> list[float]:
        h = row[head * H : (head + 1) * H]
        out = list(h)
        for i in range(H // 2):
            angle = position * THETA ** (-2 * i / H)
            pair = complex(h[i], h[i + H // 2]) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + H // 2] = pair.real, pair.imag
        return out

    rows = []
    for s in range(len(mask)):
        joined: list[float] = []
        for n in range(N):
            g = n // (N // K)
            query = turned(q[s], n, positions[s])
            first = 0 if window is None else max(0, s - window + 1)
            keys = [t for t in range(first, s + 1) if mask[t] or t == s]
            scores = [
                sum(a * b for a, b in zip(query, turned(k[t], g, positions[t]), strict=True))
                / math.sqrt(H)
                for t in keys
            ]
            exps = [math.exp(score) for score in scores]
            values = [v[t][g * H : (g + 1) * H] for t in keys]
            joined += [
                sum(e * value[i] for e, value in zip(exps, values, strict=True)) / sum(exps)
                for i in range(H)
            ]
        rows.append((torch.tensor(joined, dtype=x.dtype) @ module.proj.weight.T).tolist())
    return rows


MASKS = {
    "none": lambda n: [True] * n,
    "holes": lambda n: [i % 3 != 1 for i in range(n)],
    "left pad": lambda n: [i >= n // 2 for i in range(n)],
    "right pad": lambda n: [i < (n + 1) // 2 for i in range(n)],
    "blocked": lambda n: [False] * n,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 6), (3, 11)])
@pytest.mark.parametrize(("kv_heads", "fused"), [(1, True), (2, True), (2, False), (4, True)])
def test_equals_the_definition_written_as_loops(
    mask: str, window: int | None, batch: int, tokens: int, kv_heads: int, fused: bool
) -> None:
    module = attention(kv_heads=kv_heads, fused=fused)
    x = torch.randn(batch, tokens, 32, dtype=torch.float64)
    real = MASKS[mask](tokens)
    y, _, _ = step(module, x, torch.tensor([real] * batch), window)
    for b in range(batch):
        right = torch.tensor(loops(module, x[b], real, window), dtype=torch.float64)
        torch.testing.assert_close(y[b], right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("prompt", [1, 5])
def test_token_by_token_equals_the_full_pass(mask: str, window: int | None, prompt: int) -> None:
    module = attention()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    real = torch.tensor([MASKS[mask](12)] * 2)
    full, full_key, full_value = step(module, x, real, window)
    y, *past = step(module, x[:, :prompt], real[:, :prompt], window)
    parts = [y]
    for t in range(prompt, 12):
        key, value = past
        y, *past = step(module, x[:, t : t + 1], real[:, : t + 1], window, (key, value))
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(past[0], full_key, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(past[1], full_value, rtol=1e-10, atol=1e-12)


def test_several_new_tokens_after_a_past_see_their_own_prefix() -> None:
    """Three queries and five keys: upper-left alignment would hide the past from the first."""
    visible = visible_keys(torch.ones(1, 5, dtype=torch.bool), 3)
    assert visible[0, 0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_a_window_of_two_gives_the_means_of_two_values() -> None:
    visible = visible_keys(torch.ones(1, 4, dtype=torch.bool), 4, window=2)
    values = torch.tensor([0.0, 1.0, 2.0, 3.0]).view(1, 1, 4, 1)
    zeros = torch.zeros_like(values)
    y = grouped_attention(zeros, zeros, values, visible)
    assert y.flatten().tolist() == pytest.approx([0.0, 0.5, 1.5, 2.5])


def test_query_heads_read_the_key_value_head_of_their_group() -> None:
    """Four query heads over two value heads filled with 1 and 2: 1, 1, 2, 2."""
    module = attention()
    torch.nn.init.zeros_(module.value.weight)
    torch.nn.init.eye_(module.proj.weight)
    module.value.weight.data[:8, 0], module.value.weight.data[8:, 0] = 1.0, 2.0
    x = torch.ones(1, 3, 32, dtype=torch.float64)
    y, _, _ = step(module, x, torch.ones(1, 3, dtype=torch.bool), None)
    assert y[0, 0, ::8].tolist() == pytest.approx([1.0, 1.0, 2.0, 2.0])


def test_left_padding_does_not_change_the_tokens_behind_it() -> None:
    module = attention()
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    alone, _, _ = step(module, x, torch.ones(1, 6, dtype=torch.bool), 4)
    padded = torch.cat([torch.randn(1, 3, 32, dtype=torch.float64), x], dim=1)
    mask = torch.tensor([[False] * 3 + [True] * 6])
    y, _, _ = step(module, padded, mask, 4)
    torch.testing.assert_close(y[:, 3:], alone, rtol=1e-10, atol=1e-12)


def test_a_row_of_a_batch_equals_its_own_run() -> None:
    module = attention()
    x = torch.randn(3, 7, 32, dtype=torch.float64)
    mask = torch.tensor([MASKS[name](7) for name in ("none", "holes", "left pad")])
    together = step(module, x, mask, 3)
    for i in range(3):
        alone = step(module, x[i : i + 1], mask[i : i + 1], 3)
        for batch, row in zip(together, alone, strict=True):
            torch.testing.assert_close(batch[i : i + 1], row, rtol=1e-10, atol=1e-12)


def test_a_padded_token_is_never_blocked() -> None:
    visible = visible_keys(torch.tensor([[False, False, True]]), 3)
    assert visible[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_rotary_turns_each_pair_by_its_own_angle() -> None:
    # H = 4, theta = 100: pair 0 turns by p, pair 1 by p / 10.
    cos, sin = rotary_angles(torch.tensor([2]), 4, 100.0, torch.float64)
    x = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64).view(1, 1, 1, 4)
    y = rotate(x, cos, sin).flatten().tolist()
    assert y == pytest.approx([math.cos(2), math.cos(0.2), math.sin(2), math.sin(0.2)])


def test_rotary_angles_of_half_precision_are_exact_beyond_2048() -> None:
    cos, _ = rotary_angles(torch.tensor([2049]), 2, 10000.0, torch.float16)
    assert cos.item() == pytest.approx(math.cos(2049), abs=5e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((33, 4, 2), "dim 33 is not a multiple of heads 4"),
        ((32, 4, 3), "heads 4 is not a multiple of kv_heads 3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    arguments: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CausalCacheConfig(*arguments)


def test_a_window_of_zero_and_an_odd_head_are_refused() -> None:
    with pytest.raises(ValueError, match="a window of 0 hides every key"):
        visible_keys(torch.ones(1, 2, dtype=torch.bool), 2, window=0)
    with pytest.raises(ValueError, match="head_size 3 must be even"):
        rotary_angles(torch.tensor([0]), 3, 100.0, torch.float32)
