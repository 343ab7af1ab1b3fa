"""`vit-digits`: a small ViT trained on the UCI handwritten digits.

The digits are "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI
Machine Learning Repository, CC BY 4.0), as scikit-learn ships them; the package carries the 360
held-out ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from attn_export.models.preparing import unit
from attn_export.models.spec import Axis, ExportSpec, Metric
from attn_export.models.vit import ViT, ViTConfig

WEIGHTS = Path(__file__).parent / "weights"
CONFIG = ViTConfig(
    image_size=8, patch_size=2, channels=1, num_classes=10, dim=64, depth=6, heads=4, dropout=0.05
)
BATCH = Axis("batch", 1, 256)


def heldout_digits() -> tuple[Tensor, Tensor]:
    """Images float32 (360, 1, 8, 8) in 0..1 and labels int64 (360,), none of them trained on."""
    data = load_file(WEIGHTS / "vit_digits_heldout.safetensors")
    return data["images"].float().unsqueeze(1) / 16, data["labels"]


def draw(generator: torch.Generator, sizes: Mapping[str, int], masked: bool) -> dict[str, Tensor]:
    """Held-out digits, drawn with replacement. There is no mask to apply."""
    images, _ = heldout_digits()
    index = torch.randint(len(images), (sizes["batch"],), generator=generator)
    return {"image": images[index]}


def vit_digits() -> ExportSpec:
    """Images float32 (B, 1, 8, 8) in 0..1 to `logits` float32 (B, 10)."""
    with torch.random.fork_rng(devices=[]):
        model = ViT(CONFIG)
    model.load_state_dict(load_file(WEIGHTS / "vit_digits.safetensors"))
    images, labels = heldout_digits()
    return ExportSpec(
        module=model.eval(),
        inputs={"image": images[:2]},
        dynamic={"image": {0: BATCH}},
        outputs=("logits",),
        draw=draw,
        labels=tuple(str(digit) for digit in range(10)),
        # The set's own digits are counts of ink in 4 by 4 pixels: a box filter makes them again.
        preprocess={"image": {**unit(8, 8, interpolation="box"), "channels": "gray"}},
        postprocess={"kind": "classify"},
        metric=Metric(
            kind="top1", output="logits", inputs={"image": images}, target=labels, drop=0.01
        ),
    )
