"""Vision models and modules: exported to ONNX Runtime's CPU, and run at sizes of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export.models.attention.deformable import DeformableAttention
from attn_export.models.attention.position_sensitive import PositionSensitiveAttention
from attn_export.models.attention.window import WindowAttention
from attn_export.models.deformable_detr import deformable_detr
from attn_export.models.detector import detector
from attn_export.models.detector_digits import detector_digits
from attn_export.models.detr import detr
from attn_export.models.spec import Axis, ExportSpec
from attn_export.models.swin import swin, swin_v2
from tests.models import exporting

MASKS = ("none", "holes", "left", "right", "blocked")


class TwoMaps(nn.Module):
    """Deformable attention on two maps, with the lists taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = DeformableAttention(16, 4, levels=2, points=3)
        nn.init.normal_(self.attention.offsets.weight, std=0.3)
        nn.init.normal_(self.attention.weights.weight, std=0.3)

    def forward(self, query: Tensor, reference: Tensor, fine: Tensor, coarse: Tensor) -> Tensor:
        return self.attention(query, reference, [fine, coarse])


def on_maps(module: nn.Module, shape: tuple[str | int, ...]) -> ExportSpec:
    def draw(
        generator: torch.Generator, sizes: Mapping[str, int], masked: bool
    ) -> dict[str, Tensor]:
        size = [sizes[axis] if isinstance(axis, str) else axis for axis in shape]
        return {"x": torch.randn(size, generator=generator)}

    axes = {i: Axis(a, 1, 64) for i, a in enumerate(shape) if isinstance(a, str)}
    example = draw(torch.Generator(), {"batch": 2, "height": 9, "width": 10}, False)
    return ExportSpec(module.eval(), example, {"x": axes}, draw=draw)


def deformable() -> ExportSpec:
    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> dict[str, Tensor]:
        B, S, height, width = sizes["batch"], sizes["queries"], sizes["height"], sizes["width"]
        return {
            "query": torch.randn(B, S, 16, generator=g),
            "reference": 1.4 * torch.rand(B, S, 2, 2, generator=g) - 0.2,
            "fine": torch.randn(B, 16, height, width, generator=g),
            "coarse": torch.randn(B, 16, width, 3, generator=g),
        }

    batch, queries = Axis("batch", 1, 64), Axis("queries", 1, 64)
    height, width = Axis("height", 1, 64), Axis("width", 1, 64)
    dynamic = {
        "query": {0: batch, 1: queries},
        "reference": {0: batch, 1: queries},
        "fine": {0: batch, 2: height, 3: width},
        "coarse": {0: batch, 2: width},
    }
    example = draw(torch.Generator(), {"batch": 2, "queries": 5, "height": 6, "width": 7}, False)
    return ExportSpec(TwoMaps().eval(), example, dynamic, draw=draw)


def window(version: int, shift: int, fused: bool = True) -> Callable[[], ExportSpec]:
    return lambda: on_maps(
        WindowAttention(16, 2, 4, shift, version, fused), ("batch", "height", "width", 16)
    )


def position_sensitive(fused: bool) -> Callable[[], ExportSpec]:
    return lambda: on_maps(PositionSensitiveAttention(64, fused), ("batch", 64, "height", "width"))


TINY = [
    {"batch": 1, "queries": 1, "height": 4, "width": 4},
    {"batch": 2, "queries": 9, "height": 17, "width": 3},
    {"batch": 3, "queries": 4, "height": 5, "width": 20},
]
IMAGES = [
    {"batch": 1, "height": 128, "width": 128},
    {"batch": 2, "height": 141, "width": 256},
    {"batch": 3, "height": 160, "width": 133},
]
SPECS: dict[str, tuple[Callable[[], ExportSpec], list[dict[str, int]]]] = {
    "deformable": (deformable, TINY),
    "window": (window(1, 0), TINY),
    "window-shifted": (window(1, 2), TINY),
    "window-v2": (window(2, 0, fused=False), TINY),
    "window-v2-shifted": (window(2, 2), TINY),
    "position-sensitive": (position_sensitive(False), TINY),
    "position-sensitive-fused": (position_sensitive(True), TINY),
    "detr": (detr, IMAGES),
    "deformable-detr": (deformable_detr, IMAGES),
    "swin": (swin, IMAGES),
    "swin-v2": (swin_v2, IMAGES),
    "detector-digits": (detector_digits, IMAGES),
    "detector": (detector, IMAGES),
}


def masks_of(mask: Tensor, kind: str) -> Tensor:
    mask, half = torch.ones_like(mask), mask.shape[2] // 2
    if kind == "left":
        mask[-1, :, :half] = False
    elif kind == "right":
        mask[-1, :, half:] = False
    elif kind == "blocked":
        mask[0] = False
    return mask


def close_detections(found: np.ndarray, right: np.ndarray) -> None:
    """Equal rows in order, but for pairs whose scores differ by less than rounding does."""
    np.testing.assert_allclose(found[..., 4], right[..., 4], rtol=1e-4, atol=1e-6)
    logits = np.log(right[..., 4].astype(np.float64)) - np.log1p(-right[..., 4].astype(np.float64))
    gaps = np.pad(-np.diff(logits, axis=1), ((0, 0), (1, 1)), constant_values=1.0)
    gaps[:, -1] = 0  # the last row may change places with the first one left out
    clear = np.minimum(gaps[:, 1:], gaps[:, :-1]) > 1e-4
    assert clear.mean() > 0.4
    np.testing.assert_allclose(found[clear], right[clear], rtol=1e-3, atol=2e-2)


# Whole models, which tests/test_zoo.py takes through the main job; here at more sizes and masks.
SLOW = ("deformable-detr", "detector", "detector-digits", "detr", "swin", "swin-v2")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SPECS]


@pytest.mark.parametrize("name", NAMES)
def test_exported_graph_gives_pytorchs_values_at_other_sizes_and_masks(
    name: str, tmp_path: Path
) -> None:
    factory, sizes = SPECS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        spec = factory()
    assert spec.draw is not None
    session = exporting.session(spec, tmp_path / "model.onnx")
    generator = torch.Generator().manual_seed(7)
    for size in sizes:
        for kind in MASKS if "mask" in spec.inputs else ("none",):
            inputs = spec.draw(generator, size, kind == "holes")
            if kind != "holes" and "mask" in inputs:
                inputs["mask"] = masks_of(inputs["mask"], kind)
            with torch.no_grad():
                result = spec.module(**inputs)
            expected = (result,) if isinstance(result, Tensor) else result
            outputs = session.run(None, {key: x.numpy() for key, x in inputs.items()})
            for found, right in zip(outputs, expected, strict=True):
                if "detections" in spec.compare:
                    close_detections(found, right.numpy())
                else:
                    np.testing.assert_allclose(found, right.numpy(), rtol=1e-4, atol=2e-5)
