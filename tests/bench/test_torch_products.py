"""PyTorch's own count of the products of a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_export.bench.torch_products import count


class Learned(nn.Module):
    """A layer is given a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.ones(3, 4))
        self.layer = nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.queries.expand(x.shape[0], -1, -1))


def test_a_layer_may_be_given_a_view_of_a_parameter() -> None:
    """2 x (3 x 4) times (4 x 5), each a multiplication and an addition."""
    module, x = Learned().eval(), torch.ones(2, 1)
    with torch.inference_mode():
        assert count(lambda: module(x)) == 2 * (2 * 3 * 4 * 5)
