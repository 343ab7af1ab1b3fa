import pytest
import torch

from attn_export.models.attention.scaled_dot_product import attention
from attn_export.models.attention.sliding_window import (
    SlidingWindowAttention,
    SlidingWindowConfig,
    sliding_window_attention,
    window_mask,
)
from tests.models.attention.attention_reference import (
    MASKS,
    joined,
    key_masks,
    loop_attention,
    normal,
    packed_heads,
)


def test_a_causal_window_of_two_is_the_mean_of_a_token_and_the_one_before():
    zeros = torch.zeros(1, 1, 4, 1)
    values = torch.arange(4.0).reshape(1, 1, 4, 1)
    y = sliding_window_attention(zeros, zeros, values, window=2)
    assert y.flatten().tolist() == [0, 0.5, 1.5, 2.5]


def test_a_symmetric_window_of_two_also_sees_the_token_after():
    zeros = torch.zeros(1, 1, 4, 1)
    values = torch.tensor([0.0, 3.0, 6.0, 12.0]).reshape(1, 1, 4, 1)
    y = sliding_window_attention(zeros, zeros, values, window=2, causal=False)
    torch.testing.assert_close(y.flatten(), torch.tensor([1.5, 3, 7, 9]))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 5, 16])
@pytest.mark.parametrize("tokens", [1, 4, 16, 17, 100])
def test_blocks_equal_a_dense_mask(causal, window, tokens):
    q, k, v = normal(2, 3, tokens, 4), normal(2, 3, tokens, 4, seed=1), normal(2, 3, tokens, 6)
    y = sliding_window_attention(q, k, v, window, causal)
    torch.testing.assert_close(y, attention(q, k, v, window_mask(tokens, window, causal)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 8), (2, 11), (3, 5)])
def test_layer_equals_loops(causal, mask, batch, tokens):
    layer = SlidingWindowAttention(SlidingWindowConfig(12, 3, window=3, causal=causal)).double()
    x, real = normal(batch, tokens, 12), key_masks(batch, tokens)[mask]

    def allowed(b: int, i: int, j: int) -> bool:
        return bool(real[b, j]) and (0 <= i - j < 3 if causal else abs(i - j) < 3)

    heads = loop_attention(*packed_heads(layer.qkv, x, 3), allowed)
    torch.testing.assert_close(layer(x, real), layer.out(joined(heads)))


def test_window_counts_at_least_the_query():
    with pytest.raises(ValueError, match="window 0 is not at least 1"):
        SlidingWindowConfig(window=0)
