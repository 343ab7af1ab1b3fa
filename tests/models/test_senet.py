import pytest
import torch

from attn_export.models.senet import SEBlock, SENet, SENetConfig, senet
from attn_export.models.zoo import ZOO


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def test_first_stage_keeps_the_size_of_the_map_and_each_later_one_halves_it():
    net, maps = SENet(SENetConfig(widths=(16, 32, 64), depth=1)).eval(), []
    for block in net.blocks:
        block.register_forward_hook(lambda module, args, out: maps.append(tuple(out.shape)))
    net(torch.zeros(1, 3, 16, 24))
    assert maps == [(1, 16, 16, 24), (1, 32, 8, 12), (1, 64, 4, 6)]


def test_block_adds_its_excited_branch_to_the_shortcut():
    block = SEBlock(16, 16, stride=1, reduction=4).double().eval()
    x = torch.randn(2, 16, 5, 6, dtype=torch.float64)
    y = block.norm2(block.conv2(block.norm1(block.conv1(x)).clamp(min=0)))
    hidden = block.attn.reduce(y.flatten(2).mean(-1)).clamp(min=0)
    factors = 1 / (1 + (-block.attn.expand(hidden)).exp())
    torch.testing.assert_close(block(x), (x + y * factors.reshape(2, 16, 1, 1)).clamp(min=0))


def test_zoo_states_the_parameters_that_there_are():
    spec = ZOO["senet"].build()
    assert sum(p.numel() for p in spec.module.parameters()) == ZOO["senet"].parameters


@pytest.mark.parametrize(("batch", "height", "width"), [(1, 8, 8), (2, 32, 32), (3, 19, 40)])
def test_a_row_of_a_batch_is_its_own_run_at_any_size(batch, height, width):
    spec = senet()
    sizes = {"batch": batch, "height": height, "width": width}
    image = spec.draw(torch.Generator().manual_seed(1), sizes, False)["image"]
    logits = spec.module(image)
    assert logits.shape == (batch, 10)
    for i in range(batch):
        torch.testing.assert_close(spec.module(image[i : i + 1])[0], logits[i])


def test_factory_gives_the_same_weights_each_time_and_leaves_the_global_seed_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second = senet(), senet()
    assert torch.equal(torch.rand(3), expected)
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widths": ()}, "not all multiples of reduction 16"),
        ({"widths": (32, 40)}, "not all multiples of reduction 16"),
        ({"depth": 0}, "depth 0 is not at least 1"),
    ],
)
def test_config_refuses_what_makes_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        SENetConfig(**arguments)
