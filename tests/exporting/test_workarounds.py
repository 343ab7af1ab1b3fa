"""Constructs that PyTorch's exporter refuses as they are, in models of no particular family."""

from __future__ import annotations

import builtins
import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from attn_export.errors import ExportError
from attn_export.exporting.exporter import to_onnx
from attn_export.exporting.workarounds import plain_outputs
from attn_export.models.spec import ExportSpec

X = torch.arange(12.0).reshape(4, 3)


def answers(module: nn.Module, x: Tensor, example: Tensor = X) -> list[Any]:
    """The graph's outputs on `x`, exported with `example`."""
    model = ir.to_proto(to_onnx(ExportSpec(module.eval(), {"x": example})).model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": x.numpy()}))


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(len(x), 2)


@pytest.mark.parametrize("rows", [1, 3])
def test_len_of_a_tensor_does_not_freeze_the_batch(rows: int) -> None:
    (ones,) = answers(Rows(), X[:rows])
    np.testing.assert_array_equal(ones, np.ones((rows, 2)))


class Cached(nn.Module):
    """Returns an object that PyTorch cannot look into, as decoders return their caches."""

    def forward(self, x: Tensor, use_cache: bool = True) -> dict[str, Any]:
        layer = SimpleNamespace(keys=x + 1, values=x + 2)
        return {"y": x, "cache": SimpleNamespace(layers=[layer]) if use_cache else None}


def test_a_cache_in_the_answer_becomes_outputs() -> None:
    graph = to_onnx(ExportSpec(Cached().eval(), {"x": X})).model.graph
    assert [value.name for value in graph.outputs] == ["y", "present.0.key", "present.0.value"]
    y, key, value = answers(Cached(), X[:3])
    np.testing.assert_array_equal(y, X[:3])
    np.testing.assert_array_equal(key, X[:3] + 1)
    np.testing.assert_array_equal(value, X[:3] + 2)


class AllTrue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten._is_all_true(x > 0)


def test_whether_all_are_true_has_an_onnx_form() -> None:
    assert answers(AllTrue(), X)[0].tolist() is False  # its first element is 0
    assert answers(AllTrue(), X[1:])[0].tolist() is True


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            raise RuntimeError("not today")
        return x


def test_everything_is_put_back_also_after_an_exception() -> None:
    module, plain_len = Raises().eval(), builtins.len
    with pytest.raises(ExportError, match="not today"):
        to_onnx(ExportSpec(module, {"x": X}))
    assert builtins.len is plain_len
    assert "forward" not in vars(module)


def test_a_forward_that_was_set_on_the_module_itself_stays_its_own() -> None:
    module = Rows()

    def own(x: Tensor) -> Tensor:
        return x

    module.forward = own
    with plain_outputs(module):
        assert module(X)[0] is X
    assert vars(module)["forward"] is own


class KeepsItsGrid(nn.Module):
    """The grid is made at the first call, and kept for the next ones, as detectors do it."""

    def __init__(self) -> None:
        super().__init__()
        self.grid: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.grid = torch.arange(x.shape[-1]).to(x)
        return x + self.grid


def test_what_forward_assigns_while_it_is_traced_does_not_stay() -> None:
    module = KeepsItsGrid().eval()
    to_onnx(ExportSpec(module, {"x": torch.zeros(2, 3)}))
    assert copy.deepcopy(module)(torch.zeros(1, 4)).tolist() == [[0.0, 1.0, 2.0, 3.0]]
