"""Every model of the catalogues: sites accounted for, PyTorch's answers at other batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_export.pipeline import Options, export_and_verify
from tests.zoo_packages.catalogue import CATALOGUE

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore"),  # of what the packages' own code calls
]


@pytest.mark.parametrize("name", CATALOGUE)
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
    assert len(refused) <= CATALOGUE[name].refused, [site["reason"] for site in refused]
    (result,) = outcome.verification.runtimes.values()
    assert result.failures == ()
    assert outcome.bundle.manifest["inputs"][0]["shape"][0] == "batch"
