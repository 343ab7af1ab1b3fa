"""PyTorch's own half run judges a graph only where it means something."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export.errors import ExportError
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import ExportSpec
from attn_export.parity.cases import build_cases
from attn_export.precision.bounds import Bound, agreement, check, parse, sqnr
from attn_export.precision.judging import judge_by
from attn_export.precision.yardstick import Yardstick, measure


class WrittenNorm(nn.Module):
    """x / rms(x), written out: the squares of 300 leave float16."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


class Mixed(nn.Module):
    """Multiplies with float32 numbers of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.eye(4, dtype=torch.float32)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _measured(module: nn.Module, x: Tensor, precision: str = "fp16") -> Yardstick:
    spec = ExportSpec(module.eval(), {"x": x}, outputs=("y",))
    cases, _ = build_cases("model", spec, {})
    return measure(spec, cases, {}, precision)


@pytest.mark.parametrize(("precision", "eps"), [("fp16", 2.0**-10), ("bf16", 2.0**-7)])
def test_the_allowance_is_eight_times_its_own_error_or_eight_roundings(
    precision: str, eps: float
) -> None:
    found = _measured(Small(), torch.randn(5, 8), precision)
    assert found.used.startswith(f"PyTorch's own {precision} run")
    (case,) = found.cases
    own = case.own[precision]["y"]["all"]
    truth = case.truth["y"]
    floor = 8 * eps * np.sqrt(np.mean(np.square(truth)))
    assert own > 0
    assert case.halves[precision]["y"]["all"] == pytest.approx(max(8 * own, floor))
    assert case.allowed["y"]["all"] < 1e-4  # float32 is judged as before


def test_a_run_that_overflows_judges_nothing_though_its_answer_is_finite() -> None:
    module = WrittenNorm()
    x = 300 * torch.randn(2, 4, 64)
    assert torch.isfinite(module(x.half())).all()
    assert module(x.half()).abs().max() == 0  # x / sqrt(inf)
    found = _measured(module, x)
    assert "module.half() is off by 100% of output 'y'" in found.why_not


def test_a_model_that_mixes_precisions_is_run_under_autocast() -> None:
    found = _measured(Mixed(), torch.randn(3, 4))
    assert found.used == "PyTorch's own fp16 run, torch.autocast('cpu', float16) on the CPU"
    assert "module.half() raises RuntimeError" in found.why_not


class Overflowing(nn.Module):
    """Its answer of 1e5 is no float16."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e5 * torch.ones_like(x) @ torch.eye(4, dtype=x.dtype) * torch.sigmoid(x)


def test_without_a_yardstick_a_bound_is_needed() -> None:
    spec = ExportSpec(Overflowing().eval(), {"x": torch.randn(3, 4)}, outputs=("y",))
    cases, _ = build_cases("model", spec, {})
    graph = to_onnx(spec)
    with pytest.raises(ExportError, match=r"judges nothing: module.half\(\) is not finite"):
        judge_by(graph, "model", "fp16", cases, {}, [])
    judged, tolerance = judge_by(graph, "model", "fp16", cases, {}, [Bound("cosine", 0.99)])
    assert tolerance["yardstick"] == ""
    assert tolerance["bounds"] == [{"name": "cosine", "value": 0.99}]
    assert not judged[0].halves


def test_the_module_is_left_as_it_was() -> None:
    module = Small()
    _measured(module, torch.randn(2, 8))
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_bounds_are_measured_as_they_say() -> None:
    reference = np.array([[1.0, 2.0], [4.0, 3.0]])
    other = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert agreement([(other, reference)]) == 0.5
    # signal 30, noise 2: 10 log10(15)
    assert sqnr(other, reference) == pytest.approx(11.7609, abs=1e-4)
    metric = {"kind": "top1", "output": "y", "reference": 0.9}
    bounds = [parse("top1=0.6"), parse("top1-drop=0.05"), parse("sqnr=11")]
    found = check(bounds, {"y": [(other, reference)]}, metric, 0.86)
    assert [row.passed for row in found] == [False, True, True]
    assert found[0].problem == "top1 is 0.5, top1 at least 0.6"
    assert found[1].found == pytest.approx(0.04)


def test_a_drop_without_a_score_is_not_kept() -> None:
    (found,) = check([parse("top1-drop=1")], {}, None, None)
    assert not found.passed


def test_answers_that_are_not_finite_keep_no_bound() -> None:
    pair = (np.array([np.nan, 1.0]), np.array([1.0, 1.0]))
    assert not any(row.passed for row in check([parse("cosine=0")], {"y": [pair]}, None, None))
