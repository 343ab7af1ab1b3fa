import pytest
import torch

from attn_export.models.attention.cross import CrossAttention, CrossAttentionConfig
from tests.models.attention.attention_reference import (
    MASKS,
    joined,
    key_masks,
    loop_attention,
    normal,
)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 4, 6), (2, 5, 3), (3, 1, 7)])
def test_equals_loops(fused, mask, batch, queries, keys):
    layer = CrossAttention(CrossAttentionConfig(12, 8, heads=3, fused=fused)).double()
    x, context = normal(batch, queries, 12), normal(batch, keys, 8, seed=1)
    allowed = key_masks(batch, keys)[mask]
    q = torch.stack(layer.query(x).chunk(3, dim=-1), dim=1)
    k, v = (
        torch.stack(part.chunk(3, dim=-1), dim=1)
        for part in layer.key_value(context).chunk(2, dim=-1)
    )
    heads = loop_attention(q, k, v, lambda b, i, j: bool(allowed[b, j]))
    torch.testing.assert_close(layer(x, context, allowed), layer.out(joined(heads)))


@pytest.mark.parametrize("fused", [False, True])
def test_without_any_real_context_the_result_is_the_output_bias(fused):
    layer = CrossAttention(CrossAttentionConfig(12, 8, heads=3, fused=fused))
    y = layer(torch.ones(1, 2, 12), torch.ones(1, 4, 8), torch.zeros(1, 4, dtype=torch.bool))
    assert torch.equal(y, layer.out.bias.expand(1, 2, -1))


def test_masked_context_equals_a_shorter_one():
    layer = CrossAttention(CrossAttentionConfig(12, 8, heads=3)).double()
    x, context = normal(1, 4, 12), normal(1, 6, 8)
    mask = torch.tensor([[True, True, True, True, False, False]])
    torch.testing.assert_close(layer(x, context, mask), layer(x, context[:, :4]))


def test_heads_have_to_divide_the_width():
    with pytest.raises(ValueError, match="dim 10 is not a multiple of heads 3"):
        CrossAttentionConfig(10, 8, heads=3)
