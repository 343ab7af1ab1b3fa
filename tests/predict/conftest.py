"""What tests of `predict` share: digits as PNG files, and a bundle that hands its input on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attn_export.models.vit_digits import heldout_digits
from tests.boundary import edit_manifest
from tests.small_bundles import IDENTITY, small_bundle


@pytest.fixture
def digit_files(tmp_path: Path) -> list[Path]:
    """Ten held-out digits as 8x8 PNG files, in the order of their names."""
    images, _ = heldout_digits()
    folder = tmp_path / "digits"
    folder.mkdir()
    paths = [folder / f"{index:02d}.png" for index in range(10)]
    for path, image in zip(paths, images, strict=False):
        Image.fromarray(np.round(image[0].numpy() * 255).astype(np.uint8)).save(path)
    return paths


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """y = x, float32 (batch, 2), declared as the scores of two classes."""
    bundle = small_bundle(tmp_path / "classifier", IDENTITY)
    post = {"kind": "classify", "output": "y", "activation": "none"}
    edit_manifest(bundle, lambda m: m.update(postprocess=post, labels=["no", "yes"]))
    return bundle
