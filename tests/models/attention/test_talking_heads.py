import numpy as np
import pytest
import torch

from attn_export.models.attention.talking_heads import TalkingHeadsAttention, TalkingHeadsConfig
from tests.models.attention.attention_reference import (
    MASKS,
    joined,
    key_masks,
    loop_attention,
    normal,
    packed_heads,
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4), (2, 7), (3, 5)])
def test_equals_loops(mask, batch, tokens):
    layer = TalkingHeadsAttention(TalkingHeadsConfig(12, heads=3)).double()
    x, real = normal(batch, tokens, 12), key_masks(batch, tokens)[mask]
    q, k, v = (part.detach().numpy() for part in packed_heads(layer.qkv, x, 3))
    before, before_bias = (p.detach().numpy() for p in layer.mix_scores.parameters())
    after, after_bias = (p.detach().numpy() for p in layer.mix_weights.parameters())
    heads = np.zeros_like(v)
    for b, i in np.ndindex(batch, tokens):
        keys = [j for j in range(tokens) if real[b, j]]
        if not keys:
            continue
        scores = np.array([[q[b, n, i] @ k[b, n, j] / 2 for j in keys] for n in range(3)])
        weights = np.exp(before @ scores + before_bias[:, None])
        weights /= weights.sum(axis=1, keepdims=True)
        weights = after @ weights + after_bias[:, None]
        for n in range(3):
            heads[b, n, i] = weights[n] @ v[b, n, keys]
    torch.testing.assert_close(layer(x, real), layer.out(joined(torch.from_numpy(heads))))


def test_heads_that_do_not_talk_are_ordinary_heads():
    layer = TalkingHeadsAttention(TalkingHeadsConfig(12, heads=3)).double()
    for mix in (layer.mix_scores, layer.mix_weights):
        torch.nn.init.eye_(mix.weight)
        torch.nn.init.zeros_(mix.bias)
    x = normal(2, 5, 12)
    heads = loop_attention(*packed_heads(layer.qkv, x, 3))
    torch.testing.assert_close(layer(x), layer.out(joined(heads)))


def test_heads_have_to_divide_the_width():
    with pytest.raises(ValueError, match="dim 10 is not a multiple of heads 3"):
        TalkingHeadsConfig(10, heads=3)
