"""What a transformers folder says beside the model: its image processor, tokenizer and labels.

Read from the JSON files themselves, so that steps which are not known here are noted rather than
guessed at.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attn_export.errors import FileError, one_line
from attn_export.models.spec import ExportSpec

PROCESSOR = "preprocessor_config.json"
TOKENIZER, OPTIONS = "tokenizer.json", "tokenizer_config.json"
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's numbers
FILLS = {"input_ids": "ids", "attention_mask": "mask", "token_type_ids": "types"}


def declare(folder: Path, spec: ExportSpec, config: Any) -> list[str]:
    """Add what the folder declares to `spec`; returns notes on what could not be taken over.

    Raises:
        FileError: a file does not parse.
    """
    labels = getattr(config, "id2label", None) or {}
    kinds = getattr(config, "architectures", None) or [""]
    if kinds[0].endswith(("ForImageClassification", "ForSequenceClassification")):
        several = getattr(config, "problem_type", None) == "multi_label_classification"
        spec.postprocess = {"kind": "classify", "output": "logits"}
        spec.postprocess |= {"activation": "sigmoid"} if several else {}
        spec.labels = tuple(str(labels[index]) for index in sorted(labels))
    notes = []
    if "pixel_values" in spec.inputs and (folder / PROCESSOR).is_file():
        steps, unknown = image_steps(_json(folder / PROCESSOR))
        if unknown:
            notes.append(f"images are not declared: {folder / PROCESSOR} has {unknown}")
        else:
            spec.preprocess = {"pixel_values": steps}
    if "input_ids" in spec.inputs and (folder / TOKENIZER).is_file():
        spec.tokenizer = _text_steps(folder, spec)
    return notes


def _text_steps(folder: Path, spec: ExportSpec) -> dict[str, Any]:
    options = _json(folder / OPTIONS) if (folder / OPTIONS).is_file() else {}
    longest = int(spec.dynamic["input_ids"][1].max) if 1 in spec.dynamic["input_ids"] else 512
    pad = options.get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    return {
        "file": folder / TOKENIZER,
        "inputs": {name: what for name, what in FILLS.items() if name in spec.inputs},
        "max_length": min(longest, int(options.get("model_max_length") or longest)),
        "side": options.get("padding_side", "right"),
        "pad_id": _token(folder, pad) if pad else 0,
    }


def _token(folder: Path, token: str) -> int:
    """The number of a special token."""
    stored = _json(folder / TOKENIZER)
    for added in stored.get("added_tokens", ()):
        if added["content"] == token:
            return int(added["id"])
    vocabulary = stored.get("model", {}).get("vocab", {})
    return int(vocabulary.get(token, 0)) if isinstance(vocabulary, dict) else 0


_OTHERS = (
    "do_pad", "do_reduce_labels", "do_flip_channel_order", "do_thumbnail", "do_align_long_axis",
    "do_image_splitting", "crop_pct", "do_grayscale",
)  # fmt: skip


def image_steps(stored: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The steps of an image processor, or the name of what is not known here."""
    for key in _OTHERS:
        if stored.get(key):
            return {}, key
    steps: dict[str, Any] = {}
    if stored.get("do_resize", True):
        number = stored.get("resample", 2)
        size = _size(stored.get("size", 224))
        if size is None or not isinstance(number, int) or not 0 <= number < len(FILTERS):
            return {}, f"size {stored.get('size')} and resample {number}"
        steps["resize"] = {**size, "interpolation": FILTERS[number]}
    if stored.get("do_center_crop"):
        crop = _size(stored.get("crop_size", 224))
        if crop is None or "fit" in crop:
            return {}, f"crop_size {stored.get('crop_size')}"
        steps["crop"] = {"size": crop["size"]}
    if stored.get("do_rescale", True):
        steps["scale"] = float(stored.get("rescale_factor", 1 / 255))
    if stored.get("do_normalize", True) and stored.get("image_mean") is not None:
        steps |= {"mean": stored["image_mean"], "std": stored["image_std"]}
    return steps, ""


def _size(size: Any) -> dict[str, Any] | None:
    """An int, a pair or a dict of transformers' as our fields; None for another form."""
    if isinstance(size, int):
        return {"size": size}
    if isinstance(size, dict) and size.keys() == {"height", "width"}:
        return {"size": [size["height"], size["width"]]}
    if isinstance(size, dict) and size.keys() == {"shortest_edge"}:
        return {"size": size["shortest_edge"], "fit": "shortest"}
    return None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path} does not parse ({one_line(error)})", "save it again") from error
    if not isinstance(found, dict):
        raise FileError(f"{path} holds no object", "save it again")
    return found
