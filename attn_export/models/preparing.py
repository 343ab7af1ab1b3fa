"""How image models are fed: what `ExportSpec.preprocess` holds for most of them."""

from __future__ import annotations

from typing import Any

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def unit(height: int, width: int, **resize: Any) -> dict[str, Any]:
    """RGB from 0 to 1 at one size; `resize` has more fields of the resize step."""
    return {"resize": {"size": [height, width], **resize}, "scale": 1 / 255}


def imagenet(height: int, width: int, **resize: Any) -> dict[str, Any]:
    """The same, normalised by the means and deviations of ImageNet's training set."""
    return {**unit(height, width, **resize), "mean": IMAGENET_MEAN, "std": IMAGENET_STD}


def letterbox(height: int, width: int) -> dict[str, Any]:
    """The whole image in the middle of a grey canvas, as YOLO detectors are fed."""
    return unit(height, width, fit="letterbox", pad=114)
