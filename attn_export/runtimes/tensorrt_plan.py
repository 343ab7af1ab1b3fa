"""What TensorRT is told before it builds an engine: shapes, where engines are kept, and what not.

Option names are those of ONNX Runtime 1.31.1's TensorRT execution provider.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from attn_export.errors import UsageError
from attn_export.runtimes import graphs
from attn_export.runtimes.base import Graph, TensorSpec
from attn_export.storage import sha256

PRECISION = ("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable")
KEPT_OUT = ("trt_engine_cache_path", "trt_timing_cache_path", "trt_ep_context_file_path")


def profiles(inputs: Sequence[TensorSpec], ranges: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """The optimisation profile: smallest, usual and largest shape of every dynamic input.

    What is usual is the geometric mean of the range, so that 1..1024 is tuned for 32. An engine
    serves the whole range without being built again; a request outside of it would be a rebuild.

    Raises:
        UsageError: a dynamic size has no range.
    """
    dynamic = [spec for spec in inputs if any(isinstance(size, str) for size in spec.shape)]
    if not dynamic:
        return {}
    for spec in dynamic:
        for size in spec.shape:
            if isinstance(size, str) and size not in ranges:
                raise UsageError(
                    f"TensorRT needs a range for '{size}' of input '{spec.name}'",
                    "export again with --dynamic INPUT=AXIS:MIN..MAX",
                )
    choices = {
        "min": {name: low for name, (low, _) in ranges.items()},
        "opt": {name: usual(low, high) for name, (low, high) in ranges.items()},
        "max": {name: high for name, (_, high) in ranges.items()},
    }
    return {
        f"trt_profile_{key}_shapes": ",".join(_shape(spec, sizes) for spec in dynamic)
        for key, sizes in choices.items()
    }


def usual(low: int, high: int) -> int:
    """The geometric mean of a range, inside of it."""
    return min(high, max(low, round(math.sqrt(low * high))))


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> str:
    numbers = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
    return f"{spec.name}:{'x'.join(map(str, numbers))}"


def cache_key(model: Graph, options: Mapping[str, str], versions: str, device: str) -> str:
    """A name for the engines of one graph, as it is, on one device.

    Two graphs with the same node names and other weights, shapes or precision must never share an
    engine (microsoft/onnxruntime #32254): the graph's bytes, its weights, every option, the
    versions and the device all count.
    """
    graph = graphs.read(model)
    digest = hashlib.sha256(graph.SerializeToString(deterministic=True))
    if folder := graphs.weight_folder(model):
        for name in graphs.weight_files(graph):
            digest.update(f"{name} {sha256(folder / name)}".encode())
    counted = {key: value for key, value in options.items() if key not in KEPT_OUT}
    digest.update(json.dumps([sorted(counted.items()), versions, device]).encode())
    return digest.hexdigest()[:32]


def cache_folder(chosen: Path | None) -> Path:
    """Where engines are kept: the folder that was chosen, or the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return chosen or Path(home, "attn-export", "tensorrt")


def refuse_precision(options: Mapping[str, str]) -> None:
    """Raise UsageError where an option would compute in another precision than the graph's."""
    for name in PRECISION:
        if options.get(name, "0") not in ("0", "False", "false"):
            raise UsageError(
                f"{name} would compute in another precision than the graph was verified in",
                "export with --precision instead",
            )
