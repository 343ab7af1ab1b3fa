"""Multi-scale deformable attention against bilinear interpolation written as plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_export.models.attention.deformable import DeformableAttention, deformable_attention


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(), dtype=torch.float64)


def bilinear(image: np.ndarray, x: float, y: float) -> float:
    """The value of a map (height, width) at x, y in 0..1; zeros lie around it."""
    height, width = image.shape
    column, row = x * width - 0.5, y * height - 0.5
    total = 0.0
    for i in (math.floor(row), math.floor(row) + 1):
        for j in (math.floor(column), math.floor(column) + 1):
            if 0 <= i < height and 0 <= j < width:
                total += (1 - abs(row - i)) * (1 - abs(column - j)) * float(image[i, j])
    return total


def by_loops(values: list[Tensor], points: Tensor, weights: Tensor) -> np.ndarray:
    B, S, N, L, P, _ = points.shape
    H = values[0].shape[2]
    out = np.zeros((B, S, N * H))
    for b, s, n, h in np.ndindex(B, S, N, H):
        out[b, s, n * H + h] = sum(
            float(weights[b, s, n, level, p])
            * bilinear(values[level][b, n, h].numpy(), *points[b, s, n, level, p].tolist())
            for level in range(L)
            for p in range(P)
        )
    return out


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ((0.25, 0.25), 1.0),  # the first pixel's centre
        ((0.75, 0.25), 2.0),  # x comes first
        ((0.5, 0.5), 2.5),  # between all four
        ((0.5, 0.75), 3.5),
        ((0.0, 0.25), 0.5),  # on the edge: half of the weight falls outside
        ((1.0, 1.0), 1.0),  # on the corner: three quarters do
        ((1.25, 0.25), 0.0),  # half a map outside
        ((-3.0, 9.0), 0.0),
    ],
)
def test_a_point_reads_between_pixel_centres_and_zeros_outside(
    point: tuple[float, float], expected: float
) -> None:
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 1, 1, 2, 2)
    points = torch.tensor(point).reshape(1, 1, 1, 1, 1, 2)
    out = deformable_attention([value], points, torch.ones(1, 1, 1, 1, 1))
    assert out.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("batch", "queries", "sizes"),
    [(1, 3, [(4, 5)]), (2, 6, [(7, 2), (3, 3)]), (3, 1, [(1, 1), (2, 9), (5, 4)])],
)
def test_it_equals_the_plain_loops(batch: int, queries: int, sizes: list[tuple[int, int]]) -> None:
    N, H, P, L = 2, 3, 4, len(sizes)
    values = [randn(batch, N, H, *size) for size in sizes]
    points = (
        2 * torch.rand(batch, queries, N, L, P, 2, generator=generator(), dtype=torch.float64) - 0.5
    )  # a quarter lies inside
    weights = randn(batch, queries, N, L * P).softmax(-1).unflatten(-1, (L, P))
    out = deformable_attention(values, points, weights)
    np.testing.assert_allclose(out.numpy(), by_loops(values, points, weights), atol=1e-12)


def module(**sizes: int) -> DeformableAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = DeformableAttention(16, 4, **sizes).double()
        for layer in (attention.offsets, attention.weights):
            torch.nn.init.normal_(layer.weight, std=0.3)
    return attention


def inputs(batch: int, queries: int, sizes: list[tuple[int, int]]) -> dict[str, object]:
    random = generator()
    return {
        "query": torch.randn(batch, queries, 16, generator=random, dtype=torch.float64),
        "reference": torch.rand(
            batch, queries, len(sizes), 2, generator=random, dtype=torch.float64
        ),
        "maps": [
            torch.randn(batch, 16, *size, generator=random, dtype=torch.float64) for size in sizes
        ],
    }


def test_the_module_samples_at_reference_plus_offset_in_pixels() -> None:
    sizes = [(3, 6), (2, 2)]
    attention = module(levels=2, points=3)
    given = inputs(2, 5, sizes)
    query, reference, maps = given["query"], given["reference"], given["maps"]
    offsets = attention.offsets(query).reshape(2, 5, 4, 2, 3, 2)
    points = torch.empty(2, 5, 4, 2, 3, 2, dtype=torch.float64)
    for level, (height, width) in enumerate(sizes):
        x = reference[:, :, None, level, None, 0] + offsets[..., level, :, 0] / width
        y = reference[:, :, None, level, None, 1] + offsets[..., level, :, 1] / height
        points[..., level, :, 0], points[..., level, :, 1] = x, y
    weights = attention.weights(query).reshape(2, 5, 4, 6).softmax(-1).reshape(2, 5, 4, 2, 3)
    values = [
        torch.einsum("bdhw,ed->behw", x, attention.value.weight)
        + attention.value.bias[:, None, None]
        for x in maps
    ]
    values = [v.reshape(2, 4, 4, *v.shape[2:]).detach() for v in values]
    mixed = torch.from_numpy(by_loops(values, points.detach(), weights.detach()))
    expected = mixed @ attention.proj.weight.T + attention.proj.bias
    torch.testing.assert_close(attention(**given), expected, rtol=0, atol=1e-12)


def test_four_identical_rows_give_identical_outputs() -> None:
    one = inputs(1, 7, [(5, 4), (3, 2)])
    attention = module(levels=2)
    four = {
        key: [x.expand(4, -1, -1, -1) for x in value]
        if isinstance(value, list)
        else value.expand(4, *value.shape[1:])
        for key, value in one.items()
    }
    out = attention(**four)
    for row in out:
        assert torch.equal(row, out[0])
    torch.testing.assert_close(out[:1], attention(**one), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["none", "holes", "left", "right", "blocked"])
@pytest.mark.parametrize(("batch", "queries"), [(2, 3), (3, 11)])
def test_each_row_of_a_batch_equals_its_own_run(kind: str, batch: int, queries: int) -> None:
    sizes = [(4, 6), (2, 3)]
    attention = module(levels=2)
    given = inputs(batch, queries, sizes)
    masks = [mask_of(kind, batch, *size) for size in sizes]
    together = attention(**given, masks=masks)
    for row in range(batch):
        alone = attention(
            given["query"][row : row + 1],
            given["reference"][row : row + 1],
            [x[row : row + 1] for x in given["maps"]],
            [x[row : row + 1] for x in masks],
        )
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-12)


def mask_of(kind: str, batch: int, height: int, width: int) -> Tensor:
    mask = torch.ones(batch, height, width, dtype=torch.bool)
    if kind == "holes":
        mask[:, ::2, 1::2] = False
    elif kind == "left":
        mask[-1, :, : width // 2] = False
    elif kind == "right":
        mask[-1, :, width // 2 :] = False
    elif kind == "blocked":
        mask[0] = False
    return mask


def test_masked_cells_read_as_zeros() -> None:
    given = inputs(2, 3, [(4, 4)])
    attention = module(levels=1)
    torch.nn.init.normal_(attention.proj.bias)
    torch.nn.init.normal_(attention.value.bias)
    out = attention(**given, masks=[mask_of("blocked", 2, 4, 4)])
    torch.testing.assert_close(out[0], attention.proj.bias.expand(3, -1))
    assert not torch.allclose(out[1], attention.proj.bias.expand(3, -1))


def test_fresh_heads_look_in_their_own_directions() -> None:
    bias = DeformableAttention(8, heads=4, levels=1, points=2).offsets.bias.reshape(4, 2, 2)
    steps = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    torch.testing.assert_close(bias[:, 0], steps)
    torch.testing.assert_close(bias[:, 1], 2 * steps)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of heads"):
        DeformableAttention(10, 4)
    with pytest.raises(ValueError, match="not both positive"):
        DeformableAttention(8, 4, points=0)
    with pytest.raises(ValueError, match="1 maps, but the module has 2 levels"):
        module(levels=2)(**inputs(1, 2, [(3, 3)]))
    with pytest.raises(ValueError, match="2 maps, but points for 1"):
        deformable_attention(
            [randn(1, 1, 1, 2, 2)] * 2, randn(1, 1, 1, 1, 1, 2), randn(1, 1, 1, 1, 1)
        )
