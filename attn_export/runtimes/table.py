"""Every runtime, in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attn_export.errors import RuntimeUnavailable, UsageError
from attn_export.runtimes import (
    onnx_reference,
    openvino,
    ort_cpu,
    ort_cuda,
    ort_ep,
    ort_tensorrt,
    ort_web,
    torch_compile,
    torch_eager,
)
from attn_export.runtimes.base import Availability, Runtime

GRAPH_RUNTIMES: dict[str, Runtime] = {
    runtime.NAME: runtime
    for runtime in (ort_cpu, ort_cuda, ort_tensorrt, openvino, ort_web, onnx_reference)
}
"""Those that run a graph from a file; the plugins `ort-ep:NAME` do too."""

MODULE_RUNTIMES: dict[str, Callable[[], Availability]] = {
    torch_eager.NAME: torch_eager.availability,
    torch_compile.NAME: torch_compile.availability,
}
"""Those that run the PyTorch module itself -> whether they can."""


def names() -> list[str]:
    """Every runtime, whether it works here or not, and the plugins that are installed."""
    return [*MODULE_RUNTIMES, *GRAPH_RUNTIMES, *ort_ep.installed()]


def find(runtime: str) -> Runtime:
    """A runtime that runs graphs.

    Raises:
        UsageError: there is none of that name.
    """
    if runtime.startswith(ort_ep.PREFIX):
        return ort_ep.Plugin(runtime)
    if runtime not in GRAPH_RUNTIMES:
        raise UsageError(
            f"there is no runtime '{runtime}'", f"the runtimes are {', '.join(names())}"
        )
    return GRAPH_RUNTIMES[runtime]


def availability(runtime: str) -> Availability:
    """Whether a runtime can work here.

    Raises:
        UsageError: there is none of that name.
    """
    if runtime in MODULE_RUNTIMES:
        return MODULE_RUNTIMES[runtime]()
    return find(runtime).availability()


def available(runtimes: Sequence[str]) -> tuple[list[str], dict[str, RuntimeUnavailable]]:
    """Those that can work here, and why the others cannot."""
    found = {runtime: availability(runtime) for runtime in runtimes}
    missing = {
        runtime: RuntimeUnavailable(seen.observed, seen.fix)
        for runtime, seen in found.items()
        if not seen.ok
    }
    return [runtime for runtime in found if runtime not in missing], missing


def require(runtime: str) -> None:
    """Raise RuntimeUnavailable where a runtime cannot work, UsageError where there is none."""
    availability(runtime).require()
