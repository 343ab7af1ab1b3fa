"""`torchvision:NAME`: an image or video model of the torchvision package."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from attn_export.models.spec import ExportSpec
from attn_export.packages.built import Built, images, needs, random_weights, refused, unknown

SIDE, FRAMES = 224, 16  # where the package does not say what a model was trained on


def build(name: str) -> Built:
    """The model at the image size of its weights, with those that lie on this disk, if any.

    Raises:
        RuntimeUnavailable: torchvision is not installed.
        UsageError: it has no such model.
        ExportError: it does not build it.
    """
    models = needs("torchvision").models
    if name not in models.list_models():
        raise unknown("torchvision", name, models.list_models())
    try:
        weights = models.get_model_weights(name).DEFAULT
        builder = inspect.signature(models.get_model_builder(name)).parameters
        # A backbone's weights would be downloaded even where none are asked for.
        options = {"weights_backbone": None} if "weights_backbone" in builder else {}
        model = models.get_model(name, weights=None, **options)
        file = _on_disk(weights.url)
        if file is not None:
            model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:
        raise refused(f"torchvision:{name}", error) from error
    spec = ExportSpec(model.eval(), {_first_parameter(model): images(*_size(weights))})
    notes = _declare(spec, weights)
    fetch = f"torchvision.models.get_model('{name}', weights='DEFAULT')"
    return spec, notes if file else [random_weights(name, fetch), *notes]


def _declare(spec: ExportSpec, weights: Any) -> list[str]:
    """What the weights' own transforms do to an image, and the names of their classes."""
    preset, (name,) = weights.transforms(), spec.inputs
    if type(preset).__name__ != "ImageClassification":
        return []
    if len(preset.resize_size) != 1 or len(preset.crop_size) != 1:
        return [f"images are not declared: {preset}"]
    spec.preprocess[name] = {
        "resize": {
            "size": preset.resize_size[0],
            "fit": "shortest",
            "interpolation": preset.interpolation.value,
        },
        "crop": {"size": preset.crop_size[0], "rounding": "even"},
        "scale": 1 / 255,
        "mean": list(preset.mean),
        "std": list(preset.std),
    }
    spec.postprocess, spec.labels = {"kind": "classify"}, tuple(weights.meta["categories"])
    return []


def _first_parameter(model: torch.nn.Module) -> str:
    return next(iter(inspect.signature(model.forward).parameters))


def _on_disk(url: str) -> Path | None:
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
    return file if file.is_file() else None


def _size(weights: Any) -> tuple[int, ...]:
    """(3, height, width), or (3, frames, height, width) for a video model."""
    preset = weights.transforms()
    sides = getattr(preset, "crop_size", None) or getattr(preset, "resize_size", None) or [SIDE]
    height, width = sides[0], sides[-1]
    if type(preset).__name__ == "VideoClassification":
        return 3, max(FRAMES, int(weights.meta.get("min_temporal_size", 1))), height, width
    return 3, height, width
