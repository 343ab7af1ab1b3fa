"""`timm:NAME`: an image model of the timm package."""

from __future__ import annotations

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
        size = timm.data.resolve_model_data_config(model)["input_size"]
    except Exception as error:
        raise refused(f"timm:{name}", error) from error
    spec = ExportSpec(model.eval(), {"x": images(*size)})
    fetch = f"timm.create_model('{name}', pretrained=True)"
    return spec, [] if weights else [random_weights(name, fetch)]


def _on_disk(config: Any) -> Path | None:
    """The weights in the Hugging Face cache, which nothing is downloaded into."""
    if config is None or not config.hf_hub_id:
        return None
    file = needs("huggingface_hub").try_to_load_from_cache(config.hf_hub_id, FILE)
    return Path(file) if isinstance(file, str) else None
