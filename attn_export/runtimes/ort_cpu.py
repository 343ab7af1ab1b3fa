"""ort-cpu: ONNX Runtime's CPU execution provider."""

from __future__ import annotations

from pathlib import Path

from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes.base import Availability, GraphBytes
from attn_export.runtimes.ort import OrtSession, import_onnxruntime
from attn_export.runtimes.packages import onnxruntime_owner
from attn_export.runtimes.threads import cores

NAME = "ort-cpu"


def availability() -> Availability:
    try:
        import_onnxruntime()
    except RuntimeUnavailable as error:
        return Availability(NAME, False, error.observed, error.way_out)
    owner, number = onnxruntime_owner()
    return Availability(NAME, True, versions={owner: number})


def load(
    model: Path | bytes | GraphBytes, threads: int | None = None, optimize: bool = True
) -> OrtSession:
    """Load a model; `optimize=False` turns graph optimisations off, as a reference needs it."""
    return OrtSession(NAME, model, ["CPUExecutionProvider"], threads or cores(), optimize)
