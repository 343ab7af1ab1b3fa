import math

import pytest
import torch

from attn_export.models.attention.softcap import (
    SoftcapAttention,
    SoftcapConfig,
    softcap_attention,
)
from tests.models.attention.attention_reference import (
    MASKS,
    joined,
    key_masks,
    loop_attention,
    normal,
)


def test_scores_never_exceed_the_cap():
    query, key = torch.full((1, 1, 1, 1), 1e4), torch.tensor([1.0, -1.0]).reshape(1, 1, 2, 1)
    value = torch.tensor([1.0, 0.0]).reshape(1, 1, 2, 1)
    weight = softcap_attention(query, key, value, softcap=2.0).item()
    assert weight == pytest.approx(math.exp(2) / (math.exp(2) + math.exp(-2)))


def test_a_masked_key_weighs_nothing():
    query, key = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 2, 1)
    value = torch.tensor([1.0, 100.0]).reshape(1, 1, 2, 1)
    assert softcap_attention(query, key, value, 2.0, torch.tensor([True, False])).item() == 1.0


@pytest.mark.parametrize("query_size", [None, 9])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4), (2, 7), (3, 5)])
def test_layer_equals_loops(query_size, mask, batch, tokens):
    config = SoftcapConfig(12, heads=6, kv_heads=3, softcap=0.5, query_size=query_size)
    layer = SoftcapAttention(config).double()
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
        score=lambda n, i, j, s: 0.5 * math.tanh(s / 0.5),
        scale=1 / math.sqrt(query_size or 2),
    )
    torch.testing.assert_close(layer(x, real), layer.out(joined(heads)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "each is to be a multiple of the next"),
        ({"softcap": 0.0}, "softcap 0.0 is not positive"),
    ],
)
def test_config_refuses_what_makes_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        SoftcapConfig(**arguments)
