import pytest
import torch

from attn_export.models.attention.multi_head import (
    MultiHeadAttention,
    MultiHeadConfig,
    TorchEncoder,
    TorchMultiheadAttention,
)
from tests.models.attention.attention_reference import (
    MASKS,
    joined,
    key_masks,
    loop_attention,
    normal,
    packed_heads,
)


def double(config: MultiHeadConfig) -> MultiHeadAttention:
    return MultiHeadAttention(config).double().eval()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4), (2, 7), (3, 5)])
def test_values_wider_than_keys_equal_loops(mask, batch, tokens):
    config = MultiHeadConfig(12, heads=3, head_size=2, v_head_size=5, packed=False)
    layer, x = double(config), normal(batch, tokens, 12)
    allowed = key_masks(batch, tokens)[mask]
    q, k, v = (
        torch.stack(projection(x).chunk(3, dim=-1), dim=1)
        for projection in (layer.query, layer.key, layer.value)
    )
    heads = loop_attention(q, k, v, lambda b, i, j: bool(allowed[b, j]))
    torch.testing.assert_close(layer(x, allowed), layer.out(joined(heads)))


def test_packed_projection_is_the_three_separate_ones_in_a_row():
    packed = double(MultiHeadConfig(12, heads=3, v_head_size=5))
    separate = double(MultiHeadConfig(12, heads=3, v_head_size=5, packed=False))
    parts = [separate.query, separate.key, separate.value]
    packed.qkv.weight.data = torch.cat([part.weight.data for part in parts])
    packed.qkv.bias.data = torch.cat([part.bias.data for part in parts])
    packed.out = separate.out
    x = normal(2, 6, 12)
    torch.testing.assert_close(packed(x), separate(x))


@pytest.mark.parametrize("mask", MASKS)
def test_returned_weights_sum_to_one_over_allowed_keys_and_give_the_same_output(mask):
    fused = double(MultiHeadConfig(12, heads=3))
    written_out = double(MultiHeadConfig(12, heads=3, return_weights=True))
    written_out.load_state_dict(fused.state_dict())
    x, allowed = normal(3, 7, 12), key_masks(3, 7)[mask]
    y, weights = written_out(x, allowed)
    assert weights.shape == (3, 3, 7, 7)
    assert weights.masked_select(~allowed[:, None, None]).eq(0).all()
    sums = allowed.any(-1)[:, None, None].expand(3, 3, 7).double()
    torch.testing.assert_close(weights.sum(-1), sums)
    torch.testing.assert_close(y, fused(x, allowed))


def test_no_mask_equals_a_mask_that_allows_all():
    layer, x = double(MultiHeadConfig(12, heads=3)), normal(2, 7, 12)
    torch.testing.assert_close(layer(x), layer(x, torch.ones(2, 7, dtype=torch.bool)))


def test_heads_have_to_divide_the_width():
    with pytest.raises(ValueError, match="dim 10 is not a multiple of heads 3"):
        MultiHeadConfig(10, heads=3)


@pytest.mark.parametrize("average", [False, True])
def test_torch_multihead_equals_loops(average):
    layer = TorchMultiheadAttention(12, 3, return_weights=True, average_weights=average)
    layer = layer.double().eval()
    x, allowed = normal(3, 5, 12), key_masks(3, 5)["holes"]

    def project(x):
        return torch.nn.functional.linear(x, layer.attn.in_proj_weight, layer.attn.in_proj_bias)

    q, k, v = packed_heads(project, x, 3)
    heads = loop_attention(q, k, v, lambda b, i, j: bool(allowed[b, j]))
    y, weights = layer(x, ~allowed)
    torch.testing.assert_close(y, layer.attn.out_proj(joined(heads)))
    assert weights.shape == ((3, 5, 5) if average else (3, 3, 5, 5))
    plain = TorchMultiheadAttention(12, 3).double().eval()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(plain(x, ~allowed), y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mask", ["all", "right-pad"])
def test_encoder_fast_path_agrees_at_real_tokens_and_is_zero_elsewhere(mask):
    encoder = TorchEncoder(16, 2, depth=2).eval()
    x, real = normal(3, 6, 16).float(), key_masks(3, 6)[mask]
    layers = encoder(x, ~real)  # parameters want gradients, which rules the fast path out
    with torch.no_grad():
        fast = encoder(x, ~real)
    torch.testing.assert_close(fast[real], layers[real])
    assert fast[~real].eq(0).all()
    assert not layers[~real].eq(0).any()
