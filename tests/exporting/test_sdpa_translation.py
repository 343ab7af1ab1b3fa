"""F.scaled_dot_product_attention of any rank becomes standard Attention and gives its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_export.attention.lowering import lower
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import Axis, ExportSpec
from attn_export.parity.tolerance import Array

BATCH = Axis("batch", 1, 8)
WINDOWS, HEADS, TOKENS, SIZE = 4, 3, 5, 8
SHAPES = {
    3: (TOKENS, SIZE),
    4: (HEADS, TOKENS, SIZE),
    5: (WINDOWS, HEADS, TOKENS, SIZE),
}


@dataclass(frozen=True)
class Case:
    """Queries of `rank` axes; the keys that `keys` makes of them."""

    rank: int
    keys: Callable[[Tensor], Tensor] = lambda query: query
    mask: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, query: Tensor) -> Tensor:
        key = self.keys(query)
        mask = None
        if self.mask is not None:  # additive, with one blocked key
            mask = torch.linspace(-1, 1, math.prod(self.mask)).view(self.mask)
            mask = torch.where(torch.arange(self.mask[-1]) == 1, -torch.inf, mask)
        return F.scaled_dot_product_attention(query, key, 2 * key, mask, **self.options)


CASES = {
    "three axes": Case(3),
    "three axes, causal": Case(3, options={"is_causal": True}),
    "three axes, a mask": Case(3, mask=(5, 5)),
    "three axes, a mask for each row": Case(3, mask=(1, 5, 5)),
    "three axes, a scale": Case(3, options={"scale": 0.7}),
    "three axes, fewer keys": Case(3, lambda query: query[:, :2]),
    "four axes": Case(4),
    "four axes, one key head": Case(4, lambda query: query[:, :1]),
    "four axes, grouped heads": Case(4, lambda query: query[:, 1:2], options={"enable_gqa": True}),
    "four axes, one row of keys": Case(4, lambda query: torch.ones(1, 3, 4, 8).cumsum(2)),
    "four axes, a mask of one number for all keys": Case(4, mask=(5, 1)),
    "four axes, such a mask for each head": Case(4, mask=(1, 3, 5, 1)),
    "five axes": Case(5),
    "five axes, fewer keys": Case(5, lambda query: query[..., :3, :]),
    "five axes, a mask for each head": Case(5, mask=(3, 5, 5)),
    "five axes, a mask for each window": Case(5, mask=(4, 1, 5, 5)),
    "five axes, a mask of one number for all keys": Case(5, mask=(4, 1, 5, 1)),
    "five axes, one key head": Case(5, lambda query: query[:, :, :1]),
    "five axes, one window of keys": Case(5, lambda query: query[:, :1]),
}


class All(nn.Module):
    def forward(self, x3: Tensor, x4: Tensor, x5: Tensor) -> tuple[Tensor, ...]:
        queries = {3: x3, 4: x4, 5: x5}
        return tuple(case(queries[case.rank]) for case in CASES.values())


def inputs(batch: int) -> dict[str, Tensor]:
    torch.manual_seed(batch)
    return {f"x{rank}": torch.randn(batch, *shape) for rank, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def model() -> ir.Model:
    given = inputs(2)
    return to_onnx(ExportSpec(All().eval(), given, {name: {0: BATCH} for name in given})).model


@pytest.fixture(scope="module")
def answers(model: ir.Model) -> dict[str, tuple[Array, Array]]:
    """What ONNX Runtime and PyTorch give for each case at a batch that was not exported."""
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    given = inputs(3)
    found = session.run(None, {name: value.numpy() for name, value in given.items()})
    wanted = [value.numpy() for value in All()(**given)]
    return dict(zip(CASES, zip(found, wanted, strict=True), strict=True))


def test_each_is_one_standard_attention(model: ir.Model) -> None:
    assert [node.op_type for node in model.graph].count("Attention") == len(CASES)


def test_each_is_lowered_to_a_fused_op(model: ir.Model) -> None:
    sizes = [{"batch": 1}, {"batch": 3}, {"batch": 2}]
    account = lower(model.clone(), "ort-cpu", sizes)
    assert {o.site.name: o.reason for o in account.outcomes if o.status != "lowered"} == {}
    assert len(account.outcomes) == len(CASES)


@pytest.mark.parametrize("name", CASES)
def test_its_numbers_are_pytorch_s_at_another_batch(
    answers: dict[str, tuple[Array, Array]], name: str
) -> None:
    found, wanted = answers[name]
    np.testing.assert_allclose(found, wanted, atol=2e-6)
