import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from attn_export.models.attention.scaled_dot_product import (
    ScaledDotProductAttention,
    attention,
    attention_weights,
    causal_mask,
    key_mask_to_pairs,
    masked_softmax,
    merge_heads,
    split_heads,
)
from tests.models.attention.attention_reference import loop_attention, normal

ROOT = Path(__file__).parents[3]


@pytest.fixture
def four_tokens() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, 8, generator=generator).unbind(0)


def test_weights_of_the_first_token_are_those_of_the_worked_example(four_tokens):
    q, k, _ = four_tokens
    weights = attention_weights(q, k)
    expected = torch.tensor([0.121, 0.741, 0.106, 0.032])
    torch.testing.assert_close(weights[0], expected, rtol=0, atol=5e-4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4), rtol=0, atol=1e-6)


def test_formula_equals_the_fused_call(four_tokens):
    q, k, v = four_tokens
    fused = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(attention(q, k, v), fused, rtol=0, atol=1e-6)


def test_example_prints_the_worked_values():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "scaled_dot_product.py")],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    weights, total, difference = (line.split(": ")[1] for line in done.stdout.splitlines())
    assert weights == "[0.121, 0.741, 0.106, 0.032]"
    assert float(total) == 1.0
    assert float(difference) <= 1e-6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 3, 5), (2, 6, 2), (3, 1, 7)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_module_equals_loops(fused, batch, queries, keys, scale):
    q, k, v = normal(batch, 2, queries, 4), normal(batch, 2, keys, 4), normal(batch, 2, keys, 6)
    mask = (torch.arange(queries)[:, None] + torch.arange(keys)) % 3 != 0  # with a blocked row
    mask[-1] = False
    y = ScaledDotProductAttention(fused, scale)(q, k, v, mask.expand(batch, 1, -1, -1))
    expected = loop_attention(q, k, v, lambda b, i, j: bool(mask[i, j]), scale=scale)
    torch.testing.assert_close(y, expected)
    assert y[:, :, -1].eq(0).all()


def test_blocked_row_has_zero_weights_and_a_finite_gradient():
    scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    weights = masked_softmax(scores, torch.tensor([[True, False], [False, False]]))
    assert weights.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    weights[:, 0].sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_causal_mask_allows_the_past_and_the_token_itself():
    assert causal_mask(3).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_key_mask_repeats_for_each_query():
    pairs = key_mask_to_pairs(torch.tensor([[True, False]]), 3)
    assert pairs.tolist() == [[[[True, False]] * 3]]


def test_heads_are_consecutive_features():
    x = torch.arange(6.0).reshape(1, 1, 6)
    heads = split_heads(x, 2)
    assert heads.tolist() == [[[[0, 1, 2]], [[3, 4, 5]]]]
    assert torch.equal(merge_heads(heads), x)
