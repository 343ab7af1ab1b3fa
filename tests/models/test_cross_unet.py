"""The text-conditioned stage: attention by loops, the prompt's mask, sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_export.models.cross_unet import Attention, CrossUNetConfig, CrossUNetStage, cross_unet

CONFIG = CrossUNetConfig(in_channels=8, channels=16, prompt_dim=6, heads=2, layers=2, groups=4)


def stage() -> CrossUNetStage:
    torch.manual_seed(0)
    return CrossUNetStage(CONFIG).eval().double()


def inputs(batch: int, height: int, width: int, words: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "latent": torch.randn(batch, 8, height, width, generator=g).double(),
        "timestep": torch.randint(1000, (batch,), generator=g),
        "prompt": torch.randn(batch, words, 6, generator=g).double(),
        "prompt_mask": torch.ones(batch, words, dtype=torch.int64),
    }


@pytest.mark.parametrize(("batch", "tokens", "words"), [(1, 1, 4), (2, 6, 1), (3, 5, 9)])
def test_cross_attention_equals_its_formula(batch: int, tokens: int, words: int) -> None:
    torch.manual_seed(0)
    attention = Attention(16, 6, 2).double().requires_grad_(False)
    x, context = torch.randn(batch, tokens, 16).double(), torch.randn(batch, words, 6).double()
    mask = torch.rand(batch, words) > 0.3
    mask[:, 0] = True
    y = attention(x, context, mask[:, None, None, :])
    q, k, v = (
        x @ attention.query.weight.T,
        *(context @ m.weight.T for m in (attention.key, attention.value)),
    )
    for b in range(batch):
        allowed = mask[b].nonzero().flatten().tolist()
        for s in range(tokens):
            joined = torch.zeros(16, dtype=torch.float64)
            for h in (slice(0, 8), slice(8, 16)):
                exps = [math.exp(float(q[b, s, h] @ k[b, t, h]) / math.sqrt(8)) for t in allowed]
                for e, t in zip(exps, allowed, strict=True):
                    joined[h] += e / sum(exps) * v[b, t, h]
            right = attention.proj.weight @ joined + attention.proj.bias
            torch.testing.assert_close(y[b, s], right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("batch", "height", "width", "words"), [(1, 4, 4, 1), (2, 7, 5, 3), (3, 8, 12, 20)]
)
def test_the_next_stage_gets_half_the_size_rounded_up(
    batch: int, height: int, width: int, words: int
) -> None:
    skip, down = stage()(**inputs(batch, height, width, words))
    assert skip.shape == (batch, 16, height, width)
    assert down.shape == (batch, 16, -(-height // 2), -(-width // 2))


@pytest.mark.parametrize(
    "mask",
    [[1, 1, 0, 0, 0], [0, 0, 0, 1, 1], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1]],
    ids=["right pad", "left pad", "holes", "none"],
)
def test_masked_words_may_as_well_be_absent(mask: list[int]) -> None:
    given = inputs(2, 5, 6, 5)
    given["prompt_mask"] = torch.tensor([mask] * 2)
    skip, _ = stage()(**given)
    keep = torch.tensor(mask).bool()
    short = given | {"prompt": given["prompt"][:, keep], "prompt_mask": torch.ones(2, sum(mask))}
    torch.testing.assert_close(skip, stage()(**short)[0], rtol=1e-9, atol=1e-11)


def test_a_prompt_that_is_all_padding_adds_nothing() -> None:
    model, given = stage(), inputs(1, 4, 6, 3)
    given["prompt_mask"] = torch.zeros(1, 3, dtype=torch.int64)
    skip, _ = model(**given)
    again, _ = model(**given | {"prompt": torch.randn(1, 3, 6).double()})
    torch.testing.assert_close(skip, again)
    for transformer in model.transformers:
        torch.nn.init.zeros_(transformer.cross_attention.value.weight)
    silent, _ = model(**given | {"prompt_mask": torch.ones(1, 3)})
    torch.testing.assert_close(skip, silent)


def test_the_prompt_and_the_time_step_matter() -> None:
    model, given = stage(), inputs(1, 4, 6, 3)
    skip, _ = model(**given)
    for change in ({"prompt": given["prompt"] + 1}, {"timestep": given["timestep"] + 1}):
        other, _ = model(**given | change)
        assert (skip - other).abs().max() > 1e-3


def test_a_row_of_a_batch_equals_its_own_run() -> None:
    model, given = stage(), inputs(3, 6, 5, 4)
    given["prompt_mask"] = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 1, 0]])
    together = model(**given)
    for i in range(3):
        alone = model(**{name: value[i : i + 1] for name, value in given.items()})
        for batch, row in zip(together, alone, strict=True):
            torch.testing.assert_close(batch[i : i + 1], row, rtol=1e-10, atol=1e-12)


def test_the_example_has_more_pixels_than_words() -> None:
    given = cross_unet().inputs
    assert given["latent"].shape[2] * given["latent"].shape[3] == 96
    assert given["prompt"].shape[1] == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "channels 64 is not a multiple of heads 3"),
        ({"groups": 5}, "channels 32 and 64 must be multiples of groups 5"),
        ({"channels": 5, "in_channels": 5, "heads": 1, "groups": 5}, "even channels, not 5"),
    ],
)
def test_bad_sizes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CrossUNetConfig(**change)
