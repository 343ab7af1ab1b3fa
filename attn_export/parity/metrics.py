"""Task scores that users care about, from a runtime's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from attn_export.errors import FileError, one_line
from attn_export.parity.detections import map50
from attn_export.parity.generate import Run, exact_match, greedy
from attn_export.parity.tolerance import Array
from attn_export.storage import write_file

BATCH = 64


def top1(logits: Array, target: Array) -> float:
    """Share of rows of `logits` (B, classes) whose largest entry is `target` (B,)."""
    return float(np.mean(logits.argmax(-1) == target))


SCORES: dict[str, Callable[[Array, Array], float]] = {"top1": top1, "map50": map50}
KINDS = (*SCORES, "exact-match")


def write_metric(path: Path, inputs: Mapping[str, Array], target: Array) -> None:
    """Store held-out samples; the leading axis runs over samples."""
    tensors = {f"inputs/{name}": np.asarray(a, order="C") for name, a in inputs.items()}
    write_file(path, save({**tensors, "target": np.asarray(target, order="C")}))


def read_metric(path: Path) -> tuple[dict[str, Array], Array]:
    """Raises FileError where the file does not parse."""
    try:
        tensors = load_file(path)
        target = tensors.pop("target")
    except (SafetensorError, KeyError, OSError) as error:
        raise FileError(
            f"{path} holds no held-out samples ({one_line(error)})", "export the bundle again"
        ) from error
    return {name.removeprefix("inputs/"): array for name, array in tensors.items()}, target


def evaluate(
    manifest: Mapping[str, Any],
    runs: Mapping[str, Run],
    inputs: Mapping[str, Array],
    target: Array,
    batch: int = BATCH,
) -> float:
    """The score that `manifest["metric"]` declares, over all samples, in batches.

    Args:
        runs: component -> function from inputs to outputs; all of them for "exact-match".

    Raises:
        RuntimeUnavailable: the score needs a package that is not installed.
    """
    metric = manifest["metric"]
    parts = []
    for start in range(0, len(target), batch):
        part = {name: array[start : start + batch] for name, array in inputs.items()}
        if metric["kind"] == "exact-match":
            tokens, _ = greedy(manifest, runs, part)
            right = exact_match(tokens, target[start : start + batch], manifest["generate"]["eos"])
            parts.append(np.array([right] * len(tokens)))
        else:
            parts.append(np.asarray(runs[metric["component"]](part)[metric["output"]]))
    whole = np.concatenate(parts)
    return (
        float(whole.mean())
        if metric["kind"] == "exact-match"
        else SCORES[metric["kind"]](whole, target)
    )
