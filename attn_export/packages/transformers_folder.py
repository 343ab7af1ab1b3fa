"""`hf:PATH`: a folder with a config.json and safetensors, as the transformers package saves it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.errors import ExportError, FileError
from attn_export.models.spec import Axis, ExportSpec
from attn_export.packages.built import Built, images, needs, refused
from attn_export.packages.transformers_files import declare
from attn_export.signature import BATCH

TOKENS = 16


def build(path: str) -> Built:
    """The model that the folder's config names, in float32.

    Raises:
        RuntimeUnavailable: transformers is not installed.
        FileError: no such folder, no config in it, or weights that would have to be unpickled.
        ExportError: the package does not build it, or its inputs are of no kind known here.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileError(f"{path} holds no config.json", "name a folder that save_pretrained wrote")
    trained = any(folder.glob("*.safetensors"))
    pickled = [*folder.glob("*.bin"), *folder.glob("*.pt")]
    if pickled and not trained:
        raise FileError(
            f"the weights in {path} are pickled ({pickled[0].name})", "save them as safetensors"
        )
    transformers = needs("transformers")
    notes = [] if trained else [f"the weights are random: {path} holds no safetensors"]
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        stored = getattr(config, "dtype", None)
        kind = _kind(transformers, config)
        if trained:
            model = kind.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
            )
            if stored not in (None, torch.float32):
                notes.append(f"the weights are {stored} in {path}, and computed in float32")
        else:
            config.dtype = torch.float32
            model = kind._from_config(config)
    except Exception as error:
        raise refused(f"hf:{path}", error) from error
    if model.can_generate():
        model.config.use_cache = False
        notes.append("all tokens are computed in one pass, without a cache of keys and values")
    spec = _spec(path, model, config)
    return spec, [*notes, *declare(folder, spec, config)]


def _kind(transformers: Any, config: Any) -> Any:
    """The class that was saved; the bare model where the config does not say."""
    names = getattr(config, "architectures", None) or []
    found = getattr(transformers, names[0], None) if names else None
    return found or transformers.MODEL_MAPPING[type(config)]


def _spec(path: str, model: nn.Module, config: Any) -> ExportSpec:
    """Two rows of each input that `forward` takes, of a text model padded in the second row."""
    taken = inspect.signature(model.forward).parameters
    vision = getattr(config, "vision_config", config)
    text = getattr(config, "text_config", config)
    inputs: dict[str, Tensor] = {}
    if "input_ids" in taken:
        length = min(TOKENS, getattr(text, "max_position_embeddings", None) or TOKENS)
        inputs["input_ids"] = _tokens(text, length)
        if "attention_mask" in taken:
            inputs["attention_mask"] = torch.ones(2, length, dtype=torch.long)
            inputs["attention_mask"][1, length // 2 :] = 0
    if "pixel_values" in taken:
        inputs["pixel_values"] = images(getattr(vision, "num_channels", 3), *_sides(vision))
    if "input_features" in taken:  # audio: mel bins by frames
        inputs["input_features"] = images(config.num_mel_bins, 2 * config.max_source_positions)
    if inputs and getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        inputs["decoder_input_ids"] = _tokens(text, TOKENS // 2)
    if not inputs:
        raise ExportError(
            f"the inputs of the {type(model).__name__} in {path} are of no kind known here",
            "give a factory of your own that returns it with example inputs",
        )
    return ExportSpec(model, inputs, {name: _axes(name, text) for name in inputs})


def _tokens(config: Any, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, config.vocab_size, (2, length), generator=generator)


def _sides(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)


def _axes(name: str, config: Any) -> dict[int, Axis]:
    if name not in ("input_ids", "attention_mask", "decoder_input_ids"):
        return {0: BATCH}
    longest = getattr(config, "max_position_embeddings", None) or 512
    tokens = Axis("decoder_tokens" if name.startswith("decoder") else "tokens", 2, longest)
    return {0: BATCH, 1: tokens}
