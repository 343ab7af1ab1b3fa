"""Which op each way of writing attention becomes, and that its answers are PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from attn_export.attention.lowering import lower
from attn_export.errors import UsageError
from attn_export.parity.drawing import sizes_of
from tests.attention import modules as m
from tests.attention.graphs import SIZES, exported, op_types, run, seeded

CONTRIB, MHA = "com.microsoft.Attention", "com.microsoft.MultiHeadAttention"
STANDARD = "ai.onnx.Attention"
LAYOUT = {
    "ai.onnx.Slice",
    "ai.onnx.Squeeze",
    "ai.onnx.Transpose",
    "ai.onnx.Split",
    "ai.onnx.Gather",
}

PACKED = [
    m.Unbind, m.Chunk, m.HeadMajor, m.Indexed, m.Separate, m.Scaled, m.Causal
]  # fmt: skip


@pytest.mark.parametrize("module", PACKED)
def test_self_attention_becomes_one_packed_node_without_layout_nodes(
    module: type[nn.Module],
) -> None:
    model = seeded(module)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    account = lower(graph.model, "ort-cpu", SIZES)
    (outcome,) = account.outcomes
    assert (outcome.lowering, outcome.status, outcome.proved) == (CONTRIB, "lowered", "run")
    assert (account.total, account.lowered, account.refused) == (1, 1, 0)
    assert op_types(graph.model) == [CONTRIB, "ai.onnx.MatMul", "ai.onnx.Add"]
    for batch, tokens in ((1, 1), (3, 9), (2, 33)):
        x = torch.randn(batch, tokens, m.D)
        np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=3e-6)


@pytest.mark.parametrize("v_dim", [12, 48])
def test_values_may_have_another_head_size(v_dim: int) -> None:
    model = seeded(m.Separate, v_dim=v_dim)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    (outcome,) = lower(graph.model, "ort-cpu", SIZES).outcomes
    assert (outcome.lowering, outcome.site.v_head_size) == (CONTRIB, v_dim // m.N)
    x = torch.randn(3, 9, m.D)
    np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=3e-6)


def test_a_projection_without_bias_gets_a_zero_one() -> None:
    """The CPU kernel of com.microsoft Attention reads a missing bias and ends the process."""
    model = seeded(m.Unbind, bias=False)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    lower(graph.model, "ort-cpu", SIZES)
    node = next(node for node in graph.model.graph if node.domain == "com.microsoft")
    bias = node.inputs[2].const_value
    assert bias is not None
    np.testing.assert_array_equal(bias.numpy(), np.zeros(3 * m.D, np.float32))


@pytest.mark.parametrize(("choice", "op"), [("auto", STANDARD), ("contrib", MHA)])
def test_cross_attention_becomes_one_node_without_layout_nodes(choice: str, op: str) -> None:
    model = seeded(m.Cross)
    graph = exported(model, x=torch.randn(2, 5, m.D), context=torch.randn(2, 3, m.D))
    (outcome,) = lower(graph.model, "ort-cpu", SIZES, choice).outcomes
    assert (outcome.lowering, outcome.site.kind) == (op, "cross")
    assert not LAYOUT & set(op_types(graph.model))
    x, context = torch.randn(3, 7, m.D), torch.randn(3, 11, m.D)
    expected = model(x, context).detach()
    np.testing.assert_allclose(run(graph.model, x=x, context=context), expected, atol=3e-6)


MASKS = [
    (3, 4),  # PyTorch itself refuses (4,)
    (1, 1, 1, 4),
    (2, 1, 1, 4),
    (2, 1, 3, 4),
    (2, 2, 3, 4),
]


EITHER = pytest.mark.parametrize(("choice", "op"), [("contrib", MHA), ("standard", STANDARD)])


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@EITHER
def test_masks_of_every_broadcastable_shape_equal_pytorch(
    shape: tuple[int, ...], dtype: torch.dtype, choice: str, op: str
) -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8)
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    inputs = {"q": q, "k": k, "v": v, "mask": mask if dtype == torch.bool else mask.float() * 3}
    graph = exported(Attention(), **inputs)
    (outcome,) = lower(graph.model, "ort-cpu", sizes_of(graph.spec), choice).outcomes
    assert outcome.lowering == op
    expected = Attention()(**inputs)
    np.testing.assert_allclose(run(graph.model, **inputs), expected, atol=2e-6)


def test_a_mask_with_holes_keeps_its_holes() -> None:
    """Zero scores: each query gets the mean of the allowed values, 1.0 here and not 0.5."""

    class Attention(nn.Module):
        def forward(self, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            zero = torch.zeros_like(v)
            return torch.nn.functional.scaled_dot_product_attention(zero, zero, v, attn_mask=mask)

    v = torch.arange(4.0).view(1, 1, 4, 1)
    mask = torch.tensor([True, False, True, False]).view(1, 1, 1, 4)
    graph = exported(Attention(), v=v, mask=mask)
    lower(graph.model, "ort-cpu", sizes_of(graph.spec))
    np.testing.assert_allclose(run(graph.model, v=v, mask=mask), np.ones((1, 1, 4, 1)), atol=1e-6)


def test_a_blocked_row_is_zero_as_in_pytorch() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q = torch.randn(2, 4, 8, 16)
    mask = torch.ones(2, 4, 8, 8, dtype=torch.bool)
    mask[1, 2, 3] = False
    graph = exported(Attention(), q=q, mask=mask)
    (outcome,) = lower(graph.model, "ort-cpu", sizes_of(graph.spec)).outcomes
    result = run(graph.model, q=q, mask=mask)
    assert outcome.blocked_rows == "same"
    assert np.isfinite(result).all()
    assert not result[1, 2, 3].any()


@pytest.mark.parametrize(("number", "expected"), [(-torch.inf, 0.0), (torch.finfo().min, 1.5)])
@EITHER
def test_rows_blocked_by_an_additive_mask_get_what_pytorch_gives(
    number: float, expected: float, choice: str, op: str
) -> None:
    """0 for -inf; the mean of the values 0, 1, 2, 3 for the most negative number."""

    class Attention(nn.Module):
        def forward(self, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            zero = torch.zeros_like(v)
            return torch.nn.functional.scaled_dot_product_attention(zero, zero, v, attn_mask=mask)

    v = torch.arange(4.0).view(1, 1, 4, 1)
    mask = torch.zeros(1, 1, 4, 4)
    mask[..., 0, :], mask[..., 1, 2:] = number, number
    graph = exported(Attention(), v=v, mask=mask)
    (outcome,) = lower(graph.model, "ort-cpu", sizes_of(graph.spec), choice).outcomes
    assert (outcome.lowering, outcome.blocked_rows) == (op, "same")
    result = run(graph.model, v=v, mask=mask).ravel()
    assert result.tolist() == pytest.approx([expected, 0.5, 1.5, 1.5])
    np.testing.assert_allclose(result, Attention()(v, mask).ravel(), atol=1e-6)


@pytest.mark.parametrize(("module", "op", "reason"), [
    (m.QueryNorm, STANDARD, "not a linear projection"),
    (m.Unmerged, CONTRIB, ""),
])  # fmt: skip
def test_an_op_that_is_passed_over_says_why(module: type[nn.Module], op: str, reason: str) -> None:
    model = seeded(module)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    (outcome,) = lower(graph.model, "ort-cpu", SIZES).outcomes
    assert outcome.lowering == op
    assert reason in outcome.reason
    assert outcome.reason.startswith("other ops were passed over: ") is bool(reason)
    x = torch.randn(3, 9, m.D)
    np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=3e-6)


@pytest.mark.parametrize(("choice", "lowering", "status"), [
    ("contrib", CONTRIB, "lowered"),
    ("standard", STANDARD, "lowered"),
    ("decomposed", "decomposed", "decomposed-by-choice"),
])  # fmt: skip
def test_the_user_may_choose_the_op(choice: str, lowering: str, status: str) -> None:
    model = seeded(m.Unbind)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    (outcome,) = lower(graph.model, "ort-cpu", SIZES, choice).outcomes
    assert (outcome.lowering, outcome.status) == (lowering, status)
    x = torch.randn(3, 9, m.D)
    np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=3e-6)


def test_an_unknown_choice_is_a_usage_error() -> None:
    graph = exported(seeded(m.Unbind), x=torch.randn(2, 5, m.D))
    with pytest.raises(UsageError, match="no lowering 'fastest'"):
        lower(graph.model, "ort-cpu", SIZES, "fastest")


def test_a_forced_op_that_cannot_take_the_site_is_a_refusal_with_its_reasons() -> None:
    """Grouped heads that are not causal: no com.microsoft op computes them."""

    class Grouped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = m.split_heads(x)
            k = q[:, :2]
            return nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    graph = exported(Grouped().eval(), x=torch.randn(2, 5, m.D))
    account = lower(graph.model, "ort-cpu", SIZES, "contrib")
    (outcome,) = account.outcomes
    assert (outcome.lowering, outcome.status, account.refused) == ("decomposed", "refused", 1)
    assert "ai.onnx.Attention" not in op_types(graph.model)
    assert "grouped heads" in outcome.reason


def test_every_block_is_named_after_its_module_and_line() -> None:
    stack = nn.Sequential(seeded(m.Unbind), seeded(m.Chunk))
    graph = exported(_Named(stack), x=torch.randn(2, 5, m.D))
    account = lower(graph.model, "ort-cpu", SIZES)
    assert [outcome.site.name for outcome in account.outcomes] == ["stack.0", "stack.1"]
    nodes = [node for node in graph.model.graph if node.domain == "com.microsoft"]
    for node in nodes:
        assert node.metadata_props["attn_export.origin"].startswith("modules.py:")


class _Named(nn.Module):
    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x)


@pytest.mark.parametrize(("choice", "op", "lowered"), [
    ("auto", STANDARD, 1), ("contrib", MHA, 1), ("decomposed", "decomposed", 0),
])  # fmt: skip
def test_a_query_that_broadcasts_over_the_batch_runs(choice: str, op: str, lowered: int) -> None:
    """Kernels do not broadcast it, so it is expanded for them; a product does."""

    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.randn(1, 4, 3, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            k = m.split_heads(x)
            return torch.nn.functional.scaled_dot_product_attention(self.q, k, k)

    model = seeded(Latents)
    graph = exported(model, x=torch.randn(2, 5, m.D))
    account = lower(graph.model, "ort-cpu", SIZES, choice)
    (outcome,) = account.outcomes
    assert (outcome.lowering, account.lowered) == (op, lowered)
    x = torch.randn(3, 9, m.D)
    np.testing.assert_allclose(run(graph.model, x=x), model(x).detach(), atol=3e-6)
