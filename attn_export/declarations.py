"""What a source declares for `predict`, brought into the bundle and checked there."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import ExportError
from attn_export.models.spec import ExportSpec
from attn_export.predict.declared import read
from attn_export.storage import write_errors

TOKENIZER = "tokenizer.json"
KEYS = ("preprocess", "tokenizer", "postprocess", "labels")
HOW = "docs/predict.md has the fields"


def sections(specs: Iterable[ExportSpec]) -> dict[str, Any]:
    """The manifest's `preprocess`, `tokenizer` and `postprocess`, by the names of the graphs."""
    preprocess: dict[str, Any] = {}
    tokenizer: dict[str, Any] = {}
    postprocess: dict[str, Any] = {}
    for spec in specs:
        preprocess |= {_named(spec, name): steps for name, steps in spec.preprocess.items()}
        if spec.tokenizer:
            fills = {_named(spec, n): what for n, what in spec.tokenizer.get("inputs", {}).items()}
            tokenizer = {**spec.tokenizer, "file": TOKENIZER, "inputs": fills}
        if spec.postprocess:
            postprocess = {**_with_output(spec), **spec.postprocess}
    return {"preprocess": preprocess, "tokenizer": tokenizer, "postprocess": postprocess}


def _named(spec: ExportSpec, name: str) -> str:
    return spec.names.get(name, name)


def _with_output(spec: ExportSpec) -> dict[str, str]:
    """The output that is meant where only one can be: `logits`, or the only one."""
    if spec.postprocess.get("kind") == "generate" or not spec.outputs:
        return {}
    if "logits" in spec.outputs or len(spec.outputs) == 1:
        return {"output": "logits" if "logits" in spec.outputs else spec.outputs[0]}
    return {}


def bring(folder: Path, specs: Sequence[ExportSpec], manifest: Mapping[str, Any]) -> None:
    """Copy the tokenizer's file into a bundle's folder; refuse declarations that do not hold.

    Raises:
        ExportError: a field, input or output that is not known, or no such file.
        FileError: the copy could not be written.
    """
    try:
        read(manifest)
    except ValueError as error:
        raise ExportError(f"the declaration does not hold: {error}", HOW) from error
    for spec in specs:
        if spec.tokenizer:
            path = Path(str(spec.tokenizer["file"]))
            if not path.is_file():
                raise ExportError(f"there is no tokenizer {path}", "name a tokenizer.json")
            with write_errors(folder):
                shutil.copyfile(path, folder / TOKENIZER)


def declare(origin: str, spec: ExportSpec, facts: Any) -> None:
    """Take what a factory returned as its fourth value: any of `KEYS`.

    Raises:
        ExportError: it is something else.
    """
    if not isinstance(facts, Mapping):
        raise ExportError(f"{origin} declares {facts!r}", f"give a dict with {', '.join(KEYS)}")
    for key, value in facts.items():
        if key not in KEYS:
            raise ExportError(f"{origin} declares '{key}'", f"give any of {', '.join(KEYS)}")
        setattr(spec, key, tuple(value) if key == "labels" else value)
