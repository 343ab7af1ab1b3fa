import pytest
import torch

from attn_export.models.attention.scaled_dot_product import attention
from attn_export.models.attention.sparse import (
    BlockPattern,
    SparseAttention,
    SparseAttentionConfig,
    block_sparse_attention,
    top_k_attention,
)
from tests.models.attention.attention_reference import (
    MASKS,
    joined,
    key_masks,
    loop_attention,
    normal,
    packed_heads,
)

PATTERNS = (
    BlockPattern(block=4),
    BlockPattern(block=3, offsets=(0,), global_blocks=0),
    BlockPattern(block=2, offsets=(-4, -2, 0, 1), global_blocks=2),
    BlockPattern(block=5, offsets=(-2, -1, 0), global_blocks=1, causal=True),
)


def test_pattern_shows_the_first_block_the_own_and_the_one_before():
    pattern = BlockPattern(block=2, offsets=(-1, 0), global_blocks=1)
    seen = pattern.mask(8)[::2, ::2].int().tolist()
    assert seen == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]


def test_zero_scores_give_the_mean_over_the_pattern():
    zeros = torch.zeros(1, 1, 8, 1)
    values = torch.arange(8.0).reshape(1, 1, 8, 1)
    pattern = BlockPattern(block=2, offsets=(-1, 0), global_blocks=1)
    y = block_sparse_attention(zeros, zeros, values, pattern)
    torch.testing.assert_close(
        y.flatten(), torch.tensor([0.5, 0.5, 1.5, 1.5, 2.5, 2.5, 23 / 6, 23 / 6])
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("tokens", [1, 4, 15, 60])
def test_blocks_equal_a_dense_mask(pattern, tokens):
    q, k, v = normal(2, 3, tokens, 4), normal(2, 3, tokens, 4, seed=1), normal(2, 3, tokens, 6)
    y = block_sparse_attention(q, k, v, pattern)
    torch.testing.assert_close(y, attention(q, k, v, pattern.mask(tokens)))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 8), (3, 13)])
def test_layer_equals_loops(pattern, mask, batch, tokens):
    layer = SparseAttention(SparseAttentionConfig(12, 3, pattern)).double()
    x, real = normal(batch, tokens, 12), key_masks(batch, tokens)[mask]

    def allowed(b: int, i: int, j: int) -> bool:
        step = j // pattern.block - i // pattern.block
        in_pattern = step in pattern.offsets or j // pattern.block < pattern.global_blocks
        return bool(real[b, j]) and in_pattern and (j <= i or not pattern.causal)

    heads = loop_attention(*packed_heads(layer.qkv, x, 3), allowed)
    torch.testing.assert_close(layer(x, real), layer.out(joined(heads)))


def test_top_k_weighs_only_the_best_keys():
    query = torch.ones(1, 1, 1, 1)
    key = torch.tensor([0.0, 2.0, 1.0, 2.0]).log().clamp(min=-9).reshape(1, 1, 4, 1)
    value = torch.tensor([100.0, 1.0, 10.0, 4.0]).reshape(1, 1, 4, 1)
    assert top_k_attention(query, key, value, 2).item() == pytest.approx(2.5)
    assert top_k_attention(query, key, value, 3).item() == pytest.approx((2 + 10 + 8) / 5)


def test_top_k_keeps_every_key_that_ties_with_the_last():
    query, key = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 3, 1)
    value = torch.tensor([1.0, 2.0, 6.0]).reshape(1, 1, 3, 1)
    assert top_k_attention(query, key, value, 1).item() == pytest.approx(3)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4), (2, 7), (3, 12)])
def test_top_k_layer_equals_loops(mask, batch, tokens):
    layer = SparseAttention(SparseAttentionConfig(12, 3, top_k=4)).double()
    x, real = normal(batch, tokens, 12), key_masks(batch, tokens)[mask]
    q, k, v = (part.detach() for part in packed_heads(layer.qkv, x, 3))
    heads = torch.zeros_like(q)
    for b in range(batch):
        for n in range(3):
            for i in range(tokens):
                keys = [j for j in range(tokens) if real[b, j]]
                keys = sorted(keys, key=lambda j: -float(q[b, n, i] @ k[b, n, j]))[:4]
                one = (slice(b, b + 1), slice(n, n + 1))
                row = loop_attention(
                    q[one][:, :, i : i + 1], k[one][:, :, keys], v[one][:, :, keys]
                )
                heads[b, n, i] = row[0, 0, 0]
    torch.testing.assert_close(layer(x, real), layer.out(joined(heads)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block": 0}, "block is at least 1"),
        ({"offsets": (0, 0)}, "name a block twice"),
        ({"offsets": (0, 1), "causal": True}, "look ahead"),
    ],
)
def test_pattern_refuses_what_makes_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockPattern(**arguments)


def test_top_k_is_at_least_one():
    with pytest.raises(ValueError, match="top_k 0 is not at least 1"):
        SparseAttentionConfig(top_k=0)
