"""DETR and the deformable encoder: position codes, masks, and layers against the formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export.models.conv_backbone import ConvBackbone, halve_mask, sine_positions
from attn_export.models.deformable_detr import (
    DeformableDetrConfig,
    DeformableDetrEncoder,
    deformable_detr,
    join_levels,
    reference_points,
    split_levels,
)
from attn_export.models.detr import DecoderLayer, Detr, DetrConfig, EncoderLayer, detr

SMALL = DetrConfig(num_classes=3, widths=(4, 8), dim=16, heads=2, hidden_dim=8, queries=5)
MASKS = ("none", "holes", "left", "right", "blocked")


def randn(*shape: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(shape[1]), dtype=torch.float64
    )


def mask_of(kind: str, batch: int, height: int, width: int) -> Tensor:
    mask = torch.ones(batch, height, width, dtype=torch.bool)
    if kind == "holes":
        mask[:, height // 4 : height // 2, width // 2 :] = False
    elif kind == "left":
        mask[-1, :, : width // 2] = False
    elif kind == "right":
        mask[-1, :, width // 2 :] = False
    elif kind == "blocked":
        mask[0] = False
    return mask


def models() -> dict[str, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = DeformableDetrConfig(widths=(4, 8, 8), dim=32, heads=2, hidden_dim=8)
        built = {"detr": Detr(SMALL), "deformable-detr": DeformableDetrEncoder(small)}
    return {name: model.double().eval().requires_grad_(False) for name, model in built.items()}


MODELS = models()


def tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("batch", "height", "width"), [(2, 64, 48), (3, 37, 90)])
def test_each_row_of_a_batch_equals_its_own_run(
    name: str, kind: str, batch: int, height: int, width: int
) -> None:
    image, mask = randn(batch, 3, height, width), mask_of(kind, batch, height, width)
    together = tensors(MODELS[name](image, mask))
    for row in range(batch):
        alone = tensors(MODELS[name](image[row : row + 1], mask[row : row + 1]))
        for many, one in zip(together, alone, strict=True):
            torch.testing.assert_close(many[row : row + 1], one, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_no_mask_allows_all(name: str) -> None:
    image = randn(2, 3, 40, 40)
    without = tensors(MODELS[name](image))
    for a, b in zip(without, tensors(MODELS[name](image, mask_of("none", 2, 40, 40))), strict=True):
        assert torch.equal(a, b)


def test_answers_are_classes_with_no_object_and_boxes_within_the_image() -> None:
    logits, boxes = MODELS["detr"](randn(2, 3, 48, 64))
    assert logits.shape == (2, 5, 4)
    assert boxes.shape == (2, 5, 4)
    assert boxes.min() > 0
    assert boxes.max() < 1


@pytest.mark.parametrize("size", [(64, 96), (37, 90), (33, 1)])
def test_masks_shrink_to_the_sizes_of_the_maps(size: tuple[int, int]) -> None:
    maps = ConvBackbone(3, (4, 4, 4, 4)).eval()(torch.zeros(1, 3, *size))
    for level, fmap in enumerate(maps):
        assert (
            halve_mask(torch.ones(1, *size, dtype=torch.bool), 3 + level).shape[1:]
            == (fmap.shape[2:])
        )


def test_a_shrunk_mask_keeps_every_second_cell() -> None:
    mask = torch.tensor([[[1, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 0]]]).bool()
    assert halve_mask(mask, 1).tolist() == [[[True, False, True], [False, True, False]]]
    assert halve_mask(mask, 2).tolist() == [[[True, True]]]


def test_position_codes_turn_once_over_the_unpadded_image() -> None:
    mask = torch.ones(1, 2, 4, dtype=torch.bool)
    mask[:, :, 3] = False  # three columns are left, so column j has the angle (j + 1) / 3 turns
    codes = sine_positions(mask, 8, torch.float64)
    assert codes.shape == (1, 8, 2, 4)
    for i, j in ((0, 0), (1, 2), (0, 1)):
        row, column = 2 * math.pi * (i + 1) / 2, 2 * math.pi * (j + 1) / 3
        expected = [
            wave(angle / temperature)
            for angle in (row, column)
            for temperature in (1.0, 100.0)
            for wave in (math.sin, math.cos)
        ]
        np.testing.assert_allclose(codes[0, :, i, j].numpy(), expected, atol=1e-5)


def attend(
    layer: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor
) -> Tensor:
    """One sample, one query and one head at a time."""
    D, N = q.shape[-1], layer.num_heads
    weights, biases = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    q, k, v = (x @ w.T + b for x, w, b in zip((q, k, v), weights, biases, strict=True))
    out = torch.zeros_like(q)
    for s in range(len(q)):
        for n in range(N):
            part = slice(n * D // N, (n + 1) * D // N)
            keys = [t for t in range(len(k)) if allowed[t]]
            scores = torch.stack([q[s, part] @ k[t, part] / math.sqrt(D / N) for t in keys])
            out[s, part] = scores.exp() / scores.exp().sum() @ v[keys, part]
    return out @ layer.out_proj.weight.T + layer.out_proj.bias


@torch.no_grad()
def test_encoder_and_decoder_layers_follow_the_formula() -> None:
    encoder, decoder = EncoderLayer(SMALL).double().eval(), DecoderLayer(SMALL).double().eval()
    x, positions, queries, y = randn(2, 7, 16), randn(2, 7, 16), randn(2, 3, 16), randn(2, 3, 16)
    allowed = torch.tensor([[True] * 7, [True, False, True, True, False, False, True]])
    memory = encoder(x, positions, ~allowed)
    answers = decoder(y, queries, memory, positions, ~allowed)
    for b in range(2):
        q = x[b] + positions[b]
        expected = encoder.norm1(x[b] + attend(encoder.attn, q, q, x[b], allowed[b]))
        expected = encoder.norm2(expected + encoder.mlp(expected))
        torch.testing.assert_close(memory[b], expected, rtol=0, atol=1e-10)
        q = y[b] + queries[b]
        everywhere = torch.ones(3, dtype=torch.bool)
        z = decoder.norm1(y[b] + attend(decoder.self_attn, q, q, y[b], everywhere))
        q, k = z + queries[b], memory[b] + positions[b]
        z = decoder.norm2(z + attend(decoder.cross_attn, q, k, memory[b], allowed[b]))
        z = decoder.norm3(z + decoder.mlp(z))
        torch.testing.assert_close(answers[b], z, rtol=0, atol=1e-10)


def test_levels_are_joined_finest_first_and_split_again() -> None:
    maps = [randn(2, 4, 3, 5), randn(2, 4, 2, 2)]
    joined = join_levels(maps)
    assert joined.shape == (2, 15 + 4, 4)
    assert torch.equal(joined[1, 7], maps[0][1, :, 1, 2])
    for part, whole in zip(split_levels(joined, maps), maps, strict=True):
        assert torch.equal(part, whole)


def test_reference_points_are_the_centres_of_cells() -> None:
    points = reference_points([torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 1)])
    assert points.tolist() == [[0.25, 0.5], [0.75, 0.5], [0.5, 0.25], [0.5, 0.75]]


@pytest.mark.parametrize("factory", [detr, deformable_detr])
def test_factories_leave_the_random_state_alone_and_stay_small(factory) -> None:
    state = torch.random.get_rng_state()
    spec = factory()
    assert torch.equal(state, torch.random.get_rng_state())
    assert sum(p.numel() for p in spec.module.parameters()) < 3_000_000
    assert torch.equal(spec.inputs["image"], factory().inputs["image"])
    drawn = spec.draw(torch.Generator(), {"batch": 1, "height": 70, "width": 65}, False)
    assert drawn["mask"].all()


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        (DetrConfig, {"dim": 30, "heads": 4}, "not a multiple of heads"),
        (DetrConfig, {"dim": 6, "heads": 2}, "not a multiple of 4"),
        (DetrConfig, {"widths": (8,)}, "fewer than two"),
        (DeformableDetrConfig, {"dim": 30}, "not a multiple of heads"),
        (DeformableDetrConfig, {"dim": 48, "heads": 4}, "not a multiple of 32"),
        (DeformableDetrConfig, {"widths": (8,)}, "fewer than two"),
    ],
)
def test_what_cannot_be_is_refused(config, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(**options)
