"""Task scores that users care about, from a runtime's outputs. Needs numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from attn_export.errors import FileError, one_line
from attn_export.parity.tolerance import Array
from attn_export.storage import write_file

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
BATCH = 64


def top1(logits: Array, target: Array) -> float:
    """Share of rows of `logits` (B, classes) whose largest entry is `target` (B,)."""
    return float(np.mean(logits.argmax(-1) == target))


SCORES: dict[str, Callable[[Array, Array], float]] = {"top1": top1}


def write_metric(path: Path, inputs: Mapping[str, Array], target: Array) -> None:
    """Store held-out samples; the leading axis runs over samples."""
    tensors = {f"inputs/{name}": np.ascontiguousarray(a) for name, a in inputs.items()}
    write_file(path, save({**tensors, "target": np.ascontiguousarray(target)}))


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
    kind: str, output: str, run: Run, inputs: Mapping[str, Array], target: Array, batch: int = BATCH
) -> float:
    """The score of `run` over all samples, in batches."""
    parts = [
        run({name: array[start : start + batch] for name, array in inputs.items()})[output]
        for start in range(0, len(target), batch)
    ]
    return SCORES[kind](np.concatenate(parts), target)
