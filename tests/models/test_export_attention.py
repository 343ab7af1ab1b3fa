"""Every attention module of the catalogue: row by row, and exported to ONNX Runtime's CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from attn_export.models.attention.catalogue import CATALOGUE
from attn_export.models.senet import senet
from attn_export.models.spec import ExportSpec
from tests.models import exporting

SPECS = {**CATALOGUE, "senet": senet}
SIZES = [  # the examples have batch 2, 20 tokens, 12 keys
    {"batch": 1, "tokens": 8, "keys": 5, "height": 11, "width": 16},
    {"batch": 2, "tokens": 33, "keys": 1, "height": 32, "width": 9},
    {"batch": 3, "tokens": 65, "keys": 20, "height": 8, "width": 24},
]
MASKS = ("all", "holes", "left-pad", "right-pad", "blocked")
LINEAR = ("linear", "linear_causal", "linear_recurrent", "gated", "delta", "gated_delta")


@cache
def spec_of(name: str) -> ExportSpec:
    return SPECS[name]()


def draw(name: str, sizes: Mapping[str, int], mask: str = "holes") -> dict[str, Tensor]:
    """Inputs of a spec whose masks have the given form."""
    spec = spec_of(name)
    assert spec.draw is not None
    inputs = spec.draw(torch.Generator().manual_seed(7), sizes, mask == "holes")
    for key, x in inputs.items():
        if not key.endswith("mask") or mask in ("all", "holes"):
            continue
        position, batch = torch.arange(x.shape[-1]), torch.arange(x.shape[0])
        padding = (position < batch[:, None] + 1) & (position < x.shape[-1] - 1)
        allowed = {
            "left-pad": ~padding,
            "right-pad": ~padding.flip(-1),
            "blocked": (batch > 0)[:, None].expand_as(padding),
        }[mask]
        allowed = allowed.reshape(x.shape[0], *(1,) * (x.dim() - 2), -1).expand_as(x)
        inputs[key] = (~allowed if key == "key_padding_mask" else allowed).contiguous()
    return inputs


def call(name: str, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    # With gradients on, nn.TransformerEncoder leaves its fast path, which zeroes ignored tokens.
    result = spec_of(name).module(**inputs)
    return tuple(x.detach() for x in ((result,) if isinstance(result, Tensor) else result))


@cache
def session_of(name: str, folder: Path, masked: bool) -> ort.InferenceSession:
    spec = spec_of(name)
    inputs = {key: x for key, x in spec.inputs.items() if masked or not key.endswith("mask")}
    return exporting.session(spec, folder / f"{name}-{masked}.onnx", inputs)


def check(name: str, session: ort.InferenceSession, inputs: Mapping[str, Tensor]) -> None:
    expected = call(name, inputs)
    outputs = session.run(None, {key: x.numpy() for key, x in inputs.items()})
    assert len(outputs) == len(expected) == len(spec_of(name).outputs)
    for output, right in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output, right.numpy(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.mark.parametrize("name", SPECS)
def test_exported_graph_gives_pytorchs_values_at_other_sizes_and_masks(
    name: str, folder: Path
) -> None:
    session = session_of(name, folder, masked=True)
    takes_mask = any(key.endswith("mask") for key in spec_of(name).inputs)
    for sizes in SIZES:
        for mask in MASKS if takes_mask else ("all",):
            if mask == "blocked" and name == "torch_multihead":
                continue  # NaN in PyTorch, by its own documentation
            check(name, session, draw(name, sizes, mask))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in CATALOGUE if name not in ("scaled_dot_product", "squeeze_excitation")]
)
def test_graph_exported_without_a_mask_gives_pytorchs_values(name: str, folder: Path) -> None:
    session = session_of(name, folder, masked=False)
    for sizes in SIZES:
        inputs = draw(name, sizes)
        check(name, session, {key: x for key, x in inputs.items() if not key.endswith("mask")})


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 300])
def test_linear_forms_run_at_every_length_in_the_exported_graph(
    name: str, tokens: int, folder: Path
) -> None:
    session = session_of(name, folder, masked=True)
    check(name, session, draw(name, {"batch": 2, "tokens": tokens}))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("mask", ["all", "holes", "left-pad"])
def test_a_row_of_a_batch_is_its_own_run(name: str, mask: str) -> None:
    inputs = draw(name, SIZES[2], mask)
    batch = call(name, inputs)
    for i in range(3):
        alone = call(name, {key: x[i : i + 1] for key, x in inputs.items()})
        for one, whole in zip(alone, batch, strict=True):
            torch.testing.assert_close(one[0], whole[i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_draws_are_seeded_and_unmasked_draws_allow_everything(name: str) -> None:
    spec = spec_of(name)
    assert spec.draw is not None
    first, second = (spec.draw(torch.Generator().manual_seed(3), SIZES[0], True) for _ in "ab")
    assert list(first) == list(spec.inputs)
    assert all(torch.equal(first[key], second[key]) for key in first)
    for key, x in spec.draw(torch.Generator().manual_seed(3), SIZES[0], False).items():
        if key.endswith("mask"):
            assert x.eq(key != "key_padding_mask").all()
        for axis, declared in spec.dynamic[key].items():
            assert x.shape[axis] == SIZES[0][declared.name]
