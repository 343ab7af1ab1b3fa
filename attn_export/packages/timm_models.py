"""`timm:NAME`: an image model of the timm package."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from attn_export.models.spec import ExportSpec
from attn_export.packages.built import Built, images, needs, random_weights, refused, unknown

FILE = "model.safetensors"


def build(name: str) -> Built:
    """The model at its own image size, with the weights that its package keeps on disk, if any.

    Raises:
        RuntimeUnavailable: timm is not installed.
        UsageError: it has no such model.
        ExportError: it does not build it.
    """
    timm = needs("timm")
    known = timm.list_pretrained() if "." in name else timm.list_models()
    if name not in known:
        raise unknown("timm", name, known)
    try:
        weights = _on_disk(timm.get_pretrained_cfg(name))
        overlay = {"file": str(weights)} if weights else None
        model = timm.create_model(
            name, pretrained=weights is not None, pretrained_cfg_overlay=overlay
        )
        config = timm.data.resolve_model_data_config(model)
        labels = _labels(timm, model)
    except Exception as error:
        raise refused(f"timm:{name}", error) from error
    spec = ExportSpec(model.eval(), {"x": images(*config["input_size"])})
    steps, notes = _steps(config)
    spec.preprocess = {"x": steps} if steps else {}
    if model.num_classes:
        spec.postprocess, spec.labels = {"kind": "classify"}, labels
    fetch = f"timm.create_model('{name}', pretrained=True)"
    return spec, notes if weights else [random_weights(name, fetch), *notes]


def _steps(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What `timm.data.create_transform` does to an image that is evaluated."""
    channels, height, width = config["input_size"]
    mode, filled = config["crop_mode"], config["interpolation"]
    if channels not in (1, 3) or mode not in ("center", "squash") or filled == "random":
        return {}, [f"images are not declared: {channels} channels, crop mode {mode}, {filled}"]
    share = config["crop_pct"]
    sides = (math.floor(height / share), math.floor(width / share))
    resize: dict[str, Any] = {"size": list(sides), "interpolation": filled}
    if mode == "center" and height == width:
        resize |= {"size": sides[0], "fit": "shortest"}
    elif mode == "center":
        return {}, ["images are not declared: the crop is not a square"]
    return {
        "channels": "gray" if channels == 1 else "rgb",
        "resize": resize,
        "crop": {"size": [height, width], "rounding": "even"},
        "scale": 1 / 255,
        "mean": list(config["mean"]),
        "std": list(config["std"]),
    }, []


def _labels(timm: Any, model: Any) -> tuple[str, ...]:
    """Names of ImageNet's classes where the weights were trained on them."""
    subset = timm.data.infer_imagenet_subset(model.pretrained_cfg)
    if not subset:
        return ()
    names = timm.data.ImageNetInfo(subset)
    return tuple(names.index_to_description(index) for index in range(names.num_classes()))


def _on_disk(config: Any) -> Path | None:
    """The weights in the Hugging Face cache, which nothing is downloaded into."""
    if config is None or not config.hf_hub_id:
        return None
    file = needs("huggingface_hub").try_to_load_from_cache(config.hf_hub_id, FILE)
    return Path(file) if isinstance(file, str) else None
