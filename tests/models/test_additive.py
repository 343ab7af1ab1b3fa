"""Additive attention against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from attn_export.models.attention.additive import AdditiveAttention


def small() -> AdditiveAttention:
    """One hidden unit with every weight 1: score = tanh(q + k)."""
    attention = AdditiveAttention(1, 1, 1)
    for parameter in attention.parameters():
        torch.nn.init.ones_(parameter)
    return attention.double()


def test_two_keys_worked_out_by_hand() -> None:
    query, keys = torch.tensor([[0.5]]), torch.tensor([[[0.5], [-0.5]]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    context, weights = small()(query.double(), keys.double(), mask)
    # scores tanh(1) = 0.761594 and tanh(0) = 0: exp(0.761594) / (1 + exp(0.761594)) = 0.681700
    assert weights[0].tolist() == pytest.approx([0.6816997, 0.3183003], abs=1e-7)
    assert context.item() == pytest.approx(0.5 * (0.6816997 - 0.3183003), abs=1e-7)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 5), (3, 17)])
def test_equals_the_formula_written_as_loops(batch: int, tokens: int) -> None:
    torch.manual_seed(0)
    attention = AdditiveAttention(4, 3, 6).double()
    query = torch.randn(batch, 4, dtype=torch.float64)
    keys = torch.randn(batch, tokens, 3, dtype=torch.float64)
    mask = torch.rand(batch, tokens) > 0.3
    mask[:, 0] = True
    context, weights = attention(query, keys, mask)
    W, U = attention.query.weight.tolist(), attention.key.weight.tolist()
    v = attention.score.weight[0].tolist()
    for b in range(batch):
        exponentials = []
        for t in range(tokens):
            score = 0.0
            for w, u, v_i in zip(W, U, v, strict=True):
                total = sum(a * x for a, x in zip(w, query[b].tolist(), strict=True))
                total += sum(a * x for a, x in zip(u, keys[b, t].tolist(), strict=True))
                score += v_i * math.tanh(total)
            exponentials.append(math.exp(score) if mask[b, t] else 0.0)
        right = [e / sum(exponentials) for e in exponentials]
        assert weights[b].tolist() == pytest.approx(right, abs=1e-12)
        mean = [
            sum(w * k for w, k in zip(right, keys[b, :, i].tolist(), strict=True)) for i in range(3)
        ]
        assert context[b].tolist() == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize(
    ("mask", "right"),
    [
        ([True, True, True, True], 1.5),
        ([True, False, True, False], 1.0),
        ([False, False, True, True], 2.5),
        ([True, True, False, False], 0.5),
        ([False, False, False, False], 0.0),
    ],
    ids=["none", "holes", "left pad", "right pad", "blocked row"],
)
def test_equal_scores_give_the_mean_of_the_allowed_keys(mask: list[bool], right: float) -> None:
    attention = small()
    torch.nn.init.zeros_(attention.score.weight)
    keys = torch.tensor([[[0.0], [1.0], [2.0], [3.0]]], dtype=torch.float64)
    context, weights = attention(torch.zeros(1, 1).double(), keys, torch.tensor([mask]))
    assert context.item() == pytest.approx(right)
    assert weights.sum().item() == pytest.approx(float(any(mask)))


def test_a_row_of_a_batch_equals_its_own_run() -> None:
    torch.manual_seed(0)
    attention = AdditiveAttention(4, 3, 6)
    query, keys, mask = torch.randn(3, 4), torch.randn(3, 9, 3), torch.rand(3, 9) > 0.3
    together = attention(query, keys, mask)
    for i in range(3):
        row = slice(i, i + 1)
        for batch, alone in zip(together, attention(query[row], keys[row], mask[row]), strict=True):
            torch.testing.assert_close(batch[row], alone)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="sizes must be positive, not 4, 0 and 6"):
        AdditiveAttention(4, 0, 6)
