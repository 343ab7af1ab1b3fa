"""Every model of the catalogues: sites accounted for, PyTorch's answers at other batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from attn_export.errors import ExportError
from attn_export.exporting.exporter import to_onnx
from attn_export.parity.tolerance import Array
from attn_export.pipeline import Options, export_and_verify
from attn_export.source import resolve
from tests.zoo_packages.catalogue import CATALOGUE, NOT_EXPORTED, REFUSED, ROWS_SWAP

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore"),  # of what the packages' own code calls
]


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in NOT_EXPORTED])
def test_every_site_is_accounted_for_and_the_answers_are_pytorch_s(
    tmp_path: Path, name: str
) -> None:
    source = f"tests.zoo_packages.catalogue:{name.replace('-', '_')}"
    outcome = export_and_verify(source, tmp_path / "bundle", Options(), lambda _: None)
    (target,) = outcome.bundle.targets()
    sites = target["sites"]
    assert target["total"] == len(sites) == CATALOGUE[name].sites
    refused = [site for site in sites if site["status"] == "refused"]
    assert all(site["reason"] for site in refused)
    assert len(refused) <= REFUSED.get(name, 0), [site["reason"] for site in refused]
    (result,) = outcome.verification.runtimes.values()
    assert not result.failures or name in ROWS_SWAP, result.failures[0]
    assert outcome.bundle.manifest["inputs"][0]["shape"][0] == "batch"


@pytest.mark.parametrize("name", ROWS_SWAP)
def test_rows_that_swap_are_the_same_rows(name: str) -> None:
    source = resolve(f"tests.zoo_packages.catalogue:{name.replace('-', '_')}")
    spec = source.components["model"]
    proto = ir.to_proto(to_onnx(spec).model)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    image = torch.rand(1, *spec.inputs["x"].shape[1:], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = spec.module(image).numpy()[0]
    (found,) = session.run(None, {"images": image.numpy()})
    np.testing.assert_allclose(in_order(found[0]), in_order(expected), atol=1e-5)


def in_order(rows: Array) -> Array:
    """Detections (K, 6) sorted by class and box, whatever their place in the list."""
    rounded = np.round(rows, 3)
    return rows[np.lexsort([rounded[:, column] for column in (0, 1, 2, 3, 5)])]


@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_what_does_not_export_says_which_operation_it_is(name: str) -> None:
    source = resolve(f"tests.zoo_packages.catalogue:{name.replace('-', '_')}")
    with pytest.raises(ExportError, match=NOT_EXPORTED[name]):
        to_onnx(source.components["model"])
