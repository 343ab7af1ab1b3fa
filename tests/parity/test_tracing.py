"""What PyTorch computes inside of a model, node by node, against float64 done by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import ExportSpec
from attn_export.parity import tracing
from attn_export.parity.trace import Trace, places
from attn_export.parity.tracing import trace_all
from attn_export.reference import Case


class Small(nn.Module):
    """Casts to float32 on the way, as norms do, splits, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).to(torch.float32)
        a, b = h.split(4, dim=-1)
        return torch.where(a > 0, a, b * 3.0).sum(-1)


def traced(cases: list[Case]) -> tuple[Trace, list[str], nn.Linear]:
    torch.manual_seed(0)
    module = Small().eval()
    graph = to_onnx(ExportSpec(module, {"x": torch.randn(2, 4)}))
    found, notes = trace_all({"model": graph}, [("model", graph.model)], cases, lambda _: None)
    return found, notes, module.linear


X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
CASE = Case("batch=3", "model", {"x": X}, {})


def test_values_are_those_of_float64_with_the_error_that_float32_makes() -> None:
    found, notes, linear = traced([CASE])
    values = found["batch=3"]
    assert notes == []
    weight = linear.weight.detach().double().numpy()
    truth = X.astype(np.float64) @ weight.T
    single = linear(torch.tensor(X)).detach().numpy().astype(np.float64)
    np.testing.assert_allclose(values["linear"].samples, truth.ravel(), rtol=1e-14)
    assert values["linear"].error == np.abs(single - truth).max() > 0
    (product,) = (value for name, value in values.items() if name.startswith("mul"))
    np.testing.assert_allclose(product.samples, (truth[:, 4:] * 3).ravel(), rtol=1e-14)
    np.testing.assert_allclose(values["split_split_1"].samples, truth[:, 4:].ravel(), rtol=1e-14)


def test_what_is_true_or_false_must_be_equal() -> None:
    values = traced([CASE])[0]["batch=3"]
    assert values["gt"].exact
    assert set(values["gt"].samples) == {0.0, 1.0}


def test_the_output_has_a_truth_of_its_own_and_is_left_out() -> None:
    values = traced([CASE])[0]["batch=3"]
    stems = {re.sub(r"^(mul|gt|where)_\d+$", r"\1", name) for name in values}
    assert stems == {"linear", "split_split_0", "split_split_1", "gt", "mul", "where"}


def test_a_large_value_is_sampled_and_described_whole() -> None:
    x = np.random.default_rng(1).standard_normal((9000, 4)).astype(np.float32)
    found, _, linear = traced([Case("large", "model", {"x": x}, {})])
    value = found["large"]["linear"]
    truth = x.astype(np.float64) @ linear.weight.detach().double().numpy().T
    assert value.shape == (9000, 8)
    assert len(value.samples) == 1024
    np.testing.assert_allclose(value.samples, truth.ravel()[places(truth.size, 1024)])
    np.testing.assert_allclose(value.rms, np.sqrt(np.mean(truth**2)))
    assert value.largest == np.abs(truth).max()


def test_a_model_that_is_too_large_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "LIMIT", 100)
    found, notes, _ = traced([CASE])
    assert found == {}
    assert notes == ["values inside of model are not stored, the model is too large"]
