"""Bundles that are deployed: with and without a batch, one component and two, and of the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_export import bundle as bundles
from attn_export.build import export


@pytest.fixture(scope="session")
def gpu_bundle(tmp_path_factory: pytest.TempPathFactory) -> bundles.Bundle:
    """`text-encoder` for every target that Triton has a backend for: dynamic batch and tokens."""
    folder = tmp_path_factory.mktemp("deployed") / "bundle"
    targets = ("cpu", "cuda", "tensorrt", "openvino")
    return export("text-encoder", folder, targets=targets)


@pytest.fixture(scope="session")
def digits(digits_bundle: Path) -> bundles.Bundle:
    return bundles.read(digits_bundle)
