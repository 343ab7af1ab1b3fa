"""Every model of the catalogues: sites accounted for, PyTorch's answers at other batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_export.errors import ExportError
from attn_export.exporter import to_onnx
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


@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_what_does_not_export_says_which_operation_it_is(name: str) -> None:
    source = resolve(f"tests.zoo_packages.catalogue:{name.replace('-', '_')}")
    with pytest.raises(ExportError, match=NOT_EXPORTED[name]):
        to_onnx(source.components["model"])
