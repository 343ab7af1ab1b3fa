"""The Vision Transformer against its formula, and `vit-digits` against the digits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_export.models.vit import Attention, ViT, ViTConfig
from attn_export.models.vit_digits import WEIGHTS, heldout_digits, vit_digits


def test_attention_equals_its_formula_written_with_loops() -> None:
    torch.manual_seed(0)
    config = ViTConfig(dim=12, heads=3)
    layer = Attention(config).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = layer.qkv(x).split(12, dim=2)
    rows: list[Tensor] = []
    for b in range(2):
        heads = []
        for n in range(3):
            part = slice(4 * n, 4 * n + 4)
            weights = (q[b, :, part] @ k[b, :, part].T / math.sqrt(4)).exp()
            heads.append(weights / weights.sum(1, keepdim=True) @ v[b, :, part])
        rows.append(torch.cat(heads, dim=1))
    torch.testing.assert_close(layer(x), layer.proj(torch.stack(rows)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("image", "patch", "tokens"), [(224, 16, 197), (8, 2, 17), (512, 16, 1025)]
)
def test_the_number_of_tokens_is_that_of_the_patches_and_one(
    image: int, patch: int, tokens: int
) -> None:
    assert ViTConfig(image_size=image, patch_size=patch).tokens == tokens


def test_a_row_of_a_batch_equals_its_own_run() -> None:
    spec = vit_digits()
    images, _ = heldout_digits()
    with torch.inference_mode():
        whole, alone = spec.module(images[:3]), spec.module(images[1:2])
    torch.testing.assert_close(whole[1:2], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"image_size": 30, "patch_size": 16}, "image_size 30 is not a multiple of patch_size 16"),
    ({"dim": 10, "heads": 3}, "dim 10 is not a multiple of heads 3"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViT(ViTConfig(**arguments))


def test_the_trained_weights_are_small_and_know_the_digits() -> None:
    assert (WEIGHTS / "vit_digits.safetensors").stat().st_size < 2_000_000
    images, labels = heldout_digits()
    with torch.inference_mode():
        accuracy = (vit_digits().module(images).argmax(-1) == labels).float().mean()
    assert len(labels) == 360
    assert accuracy >= 0.97


def test_the_held_out_digits_are_those_of_scikit_learns_split() -> None:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    _, test, _, right = train_test_split(
        pixels, labels, test_size=0.2, random_state=0, stratify=labels
    )
    images, stored = heldout_digits()
    assert torch.equal(images.flatten(1) * 16, torch.tensor(test).float())
    assert torch.equal(stored, torch.tensor(right))
