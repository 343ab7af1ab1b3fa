import math

import pytest
import torch

from attn_export.models.attention.sinks import SinkAttention, SinkConfig, sink_attention
from tests.models.attention.attention_reference import (
    MASKS,
    joined,
    key_masks,
    loop_attention,
    normal,
)


def test_the_sink_takes_its_share_and_gives_nothing():
    zeros, ones = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 3, 1)
    y = sink_attention(zeros, torch.zeros(1, 1, 3, 1), ones, torch.tensor([math.log(2)]))
    assert y.item() == pytest.approx(3 / 5)


def test_a_blocked_row_gives_zeros():
    ones = torch.ones(1, 1, 2, 1)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    assert sink_attention(ones, ones, ones, torch.zeros(1), mask).eq(0).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4), (2, 7), (3, 5)])
def test_layer_equals_loops(mask, batch, tokens):
    layer = SinkAttention(SinkConfig(12, heads=6, kv_heads=3)).double()
    x, real = normal(batch, tokens, 12), key_masks(batch, tokens)[mask]
    q, k, v = (
        torch.stack(projection(x).split(2, dim=-1), dim=1)
        for projection in (layer.query, layer.key, layer.value)
    )
    heads = loop_attention(
        q,
        k,
        v,
        allowed=lambda b, i, j: bool(real[b, j]) and j <= i,
        sink=lambda n: layer.sinks[n].item(),
    )
    torch.testing.assert_close(layer(x, real), layer.out(joined(heads)))


def test_key_heads_have_to_divide_the_heads():
    with pytest.raises(ValueError, match="each is to be a multiple of the next"):
        SinkConfig(heads=4, kv_heads=3)
