"""ort-cpu: ONNX Runtime's CPU execution provider."""

from __future__ import annotations

from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes.base import DEFAULTS, Availability, Graph, LoadOptions
from attn_export.runtimes.ort import CPU, OrtSession, Settings, import_onnxruntime
from attn_export.runtimes.packages import onnxruntime_owner
from attn_export.runtimes.threads import cores

NAME = "ort-cpu"
GRAPHS = (NAME,)


def availability() -> Availability:
    try:
        import_onnxruntime()
    except RuntimeUnavailable as error:
        return Availability(NAME, False, error.observed, error.way_out)
    owner, number = onnxruntime_owner()
    return Availability(NAME, True, versions={owner: number}, device="CPU")


def load(
    model: Graph,
    threads: int | None = None,
    options: LoadOptions = DEFAULTS,
    *,
    optimize: bool = True,
    settings: Settings | None = None,
) -> OrtSession:
    """As `Runtime.load`; `optimize=False` turns graph optimisations off, as a reference needs.

    `settings` stands for what `options` says of the pool, for measurements.
    """
    return OrtSession(
        NAME, model, [CPU], threads or cores(), options, optimize=optimize, settings=settings
    )
