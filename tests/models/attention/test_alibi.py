import pytest
import torch

from attn_export.models.attention.alibi import (
    AlibiAttention,
    AlibiConfig,
    alibi_bias,
    alibi_slopes,
)
from tests.models.attention.attention_reference import (
    MASKS,
    joined,
    key_masks,
    loop_attention,
    normal,
    packed_heads,
)


def test_slopes_of_eight_heads_halve_from_head_to_head():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


def test_six_heads_take_four_slopes_and_the_odd_ones_of_eight():
    assert alibi_slopes(6).tolist() == [2.0**-i for i in (2, 4, 6, 8, 1, 3)]


def test_bias_falls_with_the_distance_to_the_key():
    bias = alibi_bias(torch.tensor([0.5]), 3)
    assert bias[0].tril().tolist() == [[0, 0, 0], [-0.5, 0, 0], [-1, -0.5, 0]]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4), (2, 7), (3, 5)])
def test_layer_equals_loops(mask, batch, tokens):
    layer = AlibiAttention(AlibiConfig(12, heads=3)).double()
    x, real = normal(batch, tokens, 12), key_masks(batch, tokens)[mask]
    slopes = (1 / 16, 1 / 256, 1 / 4)  # of two heads, and the first of four
    heads = loop_attention(
        *packed_heads(layer.qkv, x, 3),
        allowed=lambda b, i, j: bool(real[b, j]) and j <= i,
        score=lambda n, i, j, s: s - slopes[n] * (i - j),
    )
    torch.testing.assert_close(layer(x, real), layer.out(joined(heads)))


def test_heads_have_to_divide_the_width():
    with pytest.raises(ValueError, match="dim 10 is not a multiple of heads 3"):
        AlibiConfig(10, heads=3)
