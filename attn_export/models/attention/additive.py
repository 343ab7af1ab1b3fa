"""Additive attention (Bahdanau, Cho and Bengio, 2014)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AdditiveAttention(nn.Module):
    """score(q, k) = v . tanh(W q + U k), softmax over the keys, weighted sum of the values.

    "Neural Machine Translation by Jointly Learning to Align and Translate", appendix A.1.2. The
    keys are the values, as in the paper. One query at a time: the decoder's last hidden state.
    """

    def __init__(self, query_dim: int, key_dim: int, hidden: int) -> None:
        super().__init__()
        if min(query_dim, key_dim, hidden) < 1:
            raise ValueError(f"sizes must be positive, not {query_dim}, {key_dim} and {hidden}")
        self.query = nn.Linear(query_dim, hidden, bias=False)
        self.key = nn.Linear(key_dim, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Query (B, Dq), keys (B, T, Dk), bool mask (B, T) -> context (B, Dk), weights (B, T).

        True in the mask allows a key. Without any allowed key weights and context are zero.
        """
        hidden = torch.tanh(self.query(query).unsqueeze(1) + self.key(keys))  # (B, T, hidden)
        scores = self.score(hidden).squeeze(2)  # (B, T)
        # A finite filler keeps a row without allowed keys free of NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=1).masked_fill(~mask, 0.0)  # (B, T)
        context = torch.bmm(weights.unsqueeze(1), keys).squeeze(1)  # (B, Dk)
        return context, weights
