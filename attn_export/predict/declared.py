"""What a manifest declares around a model: `preprocess`, `tokenizer`, `postprocess`, `labels`.

A field that is not known here is refused rather than left out: answers would be wrong without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_export.predict.declared_values import build, mapping, one_of
from attn_export.predict.steps import ImageSteps, TextSteps
from attn_export.predict.telling import KINDS, Generate, Postprocess


@dataclass(frozen=True)
class Declared:
    """Everything that a manifest says about reading inputs and telling answers."""

    images: Mapping[str, ImageSteps] = field(default_factory=dict)
    text: TextSteps | None = None
    post: Postprocess | None = None
    labels: tuple[str, ...] = ()


def read(manifest: Mapping[str, Any]) -> Declared:
    """The sections of a manifest, checked against each other and its inputs and outputs.

    Raises:
        ValueError: what is wrong, as a clause.
    """
    images = {
        name: build(ImageSteps, steps, f"preprocess.{name}")
        for name, steps in mapping(manifest.get("preprocess", {}), "preprocess").items()
    }
    tokenizer = manifest.get("tokenizer")
    steps = None if tokenizer is None else build(TextSteps, tokenizer, "tokenizer")
    declared = Declared(images, steps, _post(manifest), tuple(manifest.get("labels", ())))
    _check_names(declared, manifest)
    return declared


def _post(manifest: Mapping[str, Any]) -> Postprocess | None:
    given = manifest.get("postprocess")
    if given is None:
        return None
    kind = mapping(given, "postprocess").get("kind")
    one_of("postprocess.kind", kind, tuple(KINDS))
    assert isinstance(kind, str)
    rest = {key: value for key, value in given.items() if key != "kind"}
    found: Postprocess = build(KINDS[kind], rest, "postprocess")
    return found


def _check_names(declared: Declared, manifest: Mapping[str, Any]) -> None:
    inputs = {entry["name"] for entry in manifest["inputs"]}
    outputs = {entry["name"] for entry in manifest["outputs"]}
    wanted = [*declared.images, *(s.mask for s in declared.images.values() if s.mask)]
    wanted += declared.text.inputs if declared.text else ()
    for name in wanted:
        if name not in inputs:
            raise ValueError(f"'{name}' is no input, the inputs are {', '.join(sorted(inputs))}")
    for field_name in ("output", "boxes"):
        told = getattr(declared.post, field_name, None)
        if told is not None and told not in outputs:
            raise ValueError(f"'{told}' is no output, the outputs are {', '.join(sorted(outputs))}")
    if isinstance(declared.post, Generate):
        if "generate" not in manifest:
            raise ValueError("postprocess generates, and the model has no loop")
        if not (declared.labels if declared.post.decode == "labels" else declared.text):
            raise ValueError(f"postprocess decodes by {declared.post.decode}, which is not there")
