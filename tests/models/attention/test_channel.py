import pytest
import torch

from attn_export.models.attention.channel import SqueezeExcitation
from tests.models.attention.attention_reference import normal


def test_each_channel_is_scaled_by_the_sigmoid_of_its_bottleneck():
    layer = SqueezeExcitation(2, reduction=2)
    layer.reduce.weight.data, layer.reduce.bias.data = torch.tensor([[1.0, 2.0]]), torch.zeros(1)
    layer.expand.weight.data = torch.tensor([[1.0], [-1.0]])
    layer.expand.bias.data = torch.zeros(2)
    x = torch.tensor([[[[0.0, 2.0]], [[1.0, 3.0]]]])  # means 1 and 2: the bottleneck is 5
    high, low = 1 / (1 + torch.tensor(-5.0).exp()), 1 / (1 + torch.tensor(5.0).exp())
    torch.testing.assert_close(layer(x), x * torch.stack([high, low])[None, :, None, None])


@pytest.mark.parametrize(("batch", "height", "width"), [(1, 1, 1), (2, 3, 5), (3, 7, 2)])
def test_equals_the_formula_in_loops(batch, height, width):
    layer, x = SqueezeExcitation(8, reduction=4).double(), normal(batch, 8, height, width)
    y = layer(x)
    w1, b1, w2, b2 = (p.detach() for p in layer.parameters())
    for b in range(batch):
        mean = torch.stack([x[b, c].sum() / (height * width) for c in range(8)])
        hidden = (w1 @ mean + b1).clamp(min=0)
        factors = 1 / (1 + (-(w2 @ hidden + b2)).exp())
        for c in range(8):
            torch.testing.assert_close(y[b, c], x[b, c] * factors[c])


def test_reduction_has_to_divide_the_channels():
    with pytest.raises(ValueError, match="channels 10 is not a multiple of reduction 16"):
        SqueezeExcitation(10)
