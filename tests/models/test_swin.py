"""Swin: patch merging by hand, the blocks' order, and the published sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_export.models.swin import Block, PatchMerging, Swin, SwinConfig, swin, swin_v2

SMALL = {"num_classes": 4, "dim": 8, "depths": (2, 2), "heads": (1, 2), "window": 4}


def images(batch: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(batch, 3, height, width, generator=generator, dtype=torch.float64)


def model(version: int) -> Swin:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Swin(SwinConfig(version=version, **SMALL)).double().eval()


@pytest.mark.parametrize(
    ("version", "window", "parameters"), [(1, 7, 28_288_354), (2, 8, 28_351_570)]
)
def test_the_default_is_the_published_swin_t(version: int, window: int, parameters: int) -> None:
    with torch.device("meta"):
        published = Swin(SwinConfig(version=version, window=window))
    assert sum(p.numel() for p in published.parameters()) == parameters


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("batch", "height", "width"), [(2, 64, 32), (3, 37, 90)])
def test_each_row_of_a_batch_equals_its_own_run(
    version: int, batch: int, height: int, width: int
) -> None:
    x = images(batch, height, width)
    together = model(version)(x)
    assert together.shape == (batch, 4)
    for row in range(batch):
        alone = model(version)(x[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-12)


def test_four_neighbours_become_one_position_columns_last() -> None:
    merging = PatchMerging(1, version=1).double()
    merging.norm = torch.nn.Identity()
    torch.nn.init.zeros_(merging.reduction.weight)
    merging.reduction.weight.data[0] = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]).double()
    out = merging(x.reshape(1, 3, 3, 1))
    # upper left, lower left, upper right, lower right; zeros lie beyond an odd side
    assert out[0, :, :, 0].tolist() == [[5241.0, 63.0], [807.0, 9.0]]


@pytest.mark.parametrize("version", [1, 2])
def test_an_incomplete_patch_is_completed_with_zeros(version: int) -> None:
    x = images(1, 30, 35)
    padded = torch.nn.functional.pad(x, (0, 1, 0, 2))
    torch.testing.assert_close(model(version)(x), model(version)(padded), rtol=0, atol=1e-12)


def test_version_1_normalises_before_and_version_2_after() -> None:
    x = images(2, 40, 16).reshape(2, 20, 12, 8)
    for version in (1, 2):
        block = Block(SwinConfig(version=version, **SMALL), stage=0, shifted=True).double()
        torch.nn.init.normal_(block.norm1.weight)
        if version == 1:
            y = x + block.attn(block.norm1(x))
            y = y + block.mlp(block.norm2(y))
        else:
            y = x + block.norm1(block.attn(x))
            y = y + block.norm2(block.mlp(y))
        torch.testing.assert_close(block(x), y)


def test_every_second_block_is_shifted_by_half_a_window() -> None:
    shifts = [layer.attn.shift for layer in model(1).layers if isinstance(layer, Block)]
    assert shifts == [0, 2, 0, 2]


@pytest.mark.parametrize("factory", [swin, swin_v2])
def test_factories_leave_the_random_state_alone_and_stay_small(factory) -> None:
    state = torch.random.get_rng_state()
    spec = factory()
    assert torch.equal(state, torch.random.get_rng_state())
    assert sum(p.numel() for p in spec.module.parameters()) < 3_000_000
    assert torch.equal(spec.inputs["image"], factory().inputs["image"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"version": 3}, "neither 1 nor 2"),
        ({"depths": (2, 2)}, "one a stage"),
        ({"dim": 95}, "not a multiple of heads"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SwinConfig(**options)
