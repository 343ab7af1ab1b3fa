"""Example inputs that are no tensors."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_export.errors import ExportError
from attn_export.exporting.exporter import to_onnx
from attn_export.inputs import tensors_only
from attn_export.models.spec import ExportSpec
from attn_export.parity.cases import build_cases
from attn_export.signature import describe

X = torch.arange(6.0).reshape(2, 3)


class Layer:
    """A cache's layer, which grows where it stands, as the transformers package's do."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class Decoder(nn.Module):
    """Appends x to the keys, twice x to the values, and returns what it then holds."""

    def forward(self, x: Tensor, cache: Any = None, doubled: bool = False) -> dict[str, Any]:
        new = x[:, None, :, None]
        layer = cache.layers[0]
        layer.keys = torch.cat([layer.keys, new], dim=2)
        layer.values = torch.cat([layer.values, 2 * new], dim=2)
        y = (layer.keys * layer.values).sum((1, 2, 3))
        return {"y": 2 * y if doubled else y, "cache": cache}


def cache(length: int = 4) -> Any:
    shape = (2, 1, length, 1)
    return SimpleNamespace(layers=[Layer(torch.ones(shape), torch.ones(shape))])


def described(**given: Any) -> ExportSpec:
    dynamic = {"x": {1: "new"}, "cache": {2: "past"}}
    return describe("it", (Decoder(), {"x": X, "cache": cache(), **given}, dynamic))


def test_a_module_of_tensors_alone_is_left_as_it_is() -> None:
    module = Decoder()
    assert tensors_only(module, {"x": X})[0] is module


def test_a_cache_becomes_an_input_for_each_tensor() -> None:
    spec = described()
    assert list(spec.inputs) == ["x", "past_key_values_0_key", "past_key_values_0_value"]
    assert spec.dynamic["past_key_values_0_value"][2].name == "past"
    graph = to_onnx(spec)
    names = ["past_key_values.0.key", "past_key_values.0.value"]
    assert [value.name for value in graph.model.graph.inputs] == ["x", *names]
    assert graph.spec.outputs == ("y", "present.0.key", "present.0.value")
    assert graph.spec.state == (
        ("present.0.key", names[0], 2),
        ("present.0.value", names[1], 2),
    )


def test_every_call_starts_from_the_tensors_that_it_is_given() -> None:
    own = cache()
    spec = described(cache=own)
    for _ in range(2):  # 4 ones, then the sum of 2 x^2
        assert spec.module(**spec.inputs)["y"].tolist() == [4 + 2 * 5, 4 + 2 * 50]
    assert own.layers[0].keys.shape[2] == 4
    copied = copy.deepcopy(spec.module).double()
    doubles = {name: value.double() for name, value in spec.inputs.items()}
    assert copied(**doubles)["y"].dtype is torch.float64


def test_a_flag_keeps_its_value() -> None:
    spec = described(doubled=True)
    assert "doubled" not in spec.inputs
    assert spec.module(**spec.inputs)["y"].tolist() == [28, 208]


def test_caches_of_other_lengths_are_cases() -> None:
    cases, _ = build_cases("model", to_onnx(described()).spec, {})
    lengths = {case.inputs["past_key_values.0.key"].shape[2] for case in cases}
    assert len(lengths) > 1


def test_other_values_are_named() -> None:
    with pytest.raises(ExportError, match="input 'cache' of it is PosixPath"):
        described(cache=Path())
