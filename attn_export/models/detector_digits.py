"""The detector trained on handwritten digits, with its held-out score."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor

from attn_export.models.detector import Detector, DetectorConfig, detector_spec
from attn_export.models.digit_scenes import WEIGHTS, digit_scenes, heldout_digits
from attn_export.models.spec import ExportSpec, Metric

DIGITS_CONFIG = DetectorConfig(num_classes=10, widths=(16, 24, 48, 64, 128), head_dim=32)
SCENES = 64


def detector_digits() -> ExportSpec:
    """Trained by examples/train_detector_digits.py; scored by mAP@0.5 on 64 held-out scenes."""
    with torch.random.fork_rng(devices=[]):
        module = Detector(DIGITS_CONFIG)
    module.load_state_dict(load_file(WEIGHTS / "detector_digits.safetensors"))
    heldout = heldout_digits()

    def draw(
        generator: torch.Generator, sizes: Mapping[str, int], masked: bool
    ) -> dict[str, Tensor]:
        height, width = sizes["height"], sizes["width"]
        return {"image": digit_scenes(*heldout, sizes["batch"], generator, height, width)[0]}

    images, target = digit_scenes(*heldout, SCENES, torch.Generator().manual_seed(2))
    spec = detector_spec(module, draw, height=160, width=160)
    spec.labels = tuple("0123456789")
    spec.metric = Metric("map50", "detections", {"image": images}, target, drop=0.01)
    return spec
