import numpy as np
import pytest
import torch

from attn_export.models.attention.channels_cross_covariance import (
    CrossCovarianceAttention,
    CrossCovarianceConfig,
)
from tests.models.attention.attention_reference import (
    MASKS,
    joined,
    key_masks,
    normal,
    packed_heads,
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4), (2, 7), (3, 5)])
def test_equals_loops(mask, batch, tokens):
    layer = CrossCovarianceAttention(CrossCovarianceConfig(12, heads=3)).double()
    layer.temperature.data = torch.tensor([0.5, 1.0, 2.0]).double().reshape(3, 1, 1)
    x, real = normal(batch, tokens, 12), key_masks(batch, tokens)[mask]
    q, k, v = (part.detach().numpy() for part in packed_heads(layer.qkv, x, 3))
    heads = np.zeros_like(v)
    for b, n in np.ndindex(batch, 3):
        keep = real[b].numpy()[:, None]
        qs, ks = q[b, n] * keep, k[b, n] * keep
        qs, ks = (part / np.maximum(np.linalg.norm(part, axis=0), 1e-12) for part in (qs, ks))
        for c in range(4):
            weights = np.exp([qs[:, c] @ ks[:, d] * layer.temperature[n].item() for d in range(4)])
            heads[b, n, :, c] = v[b, n] @ (weights / weights.sum())
    torch.testing.assert_close(layer(x, real), layer.out(joined(torch.from_numpy(heads))))


def test_order_of_tokens_does_not_matter():
    layer, x = CrossCovarianceAttention(CrossCovarianceConfig(12, 3)).double(), normal(2, 5, 12)
    torch.testing.assert_close(layer(x.flip(1)), layer(x).flip(1))


def test_heads_have_to_divide_the_width():
    with pytest.raises(ValueError, match="dim 10 is not a multiple of heads 3"):
        CrossCovarianceConfig(10, heads=3)
