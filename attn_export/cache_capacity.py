"""`--cache-capacity`: what it may be asked for, and the graph whose caches will be buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from attn_export.attention.fixed_cache import growing, new_tokens
from attn_export.errors import ExportError, UsageError
from attn_export.exporting.exporter import Graph, completed, to_onnx
from attn_export.models.spec import Axis, ExportSpec
from attn_export.parity.drawing import cache_axes

TARGETS = ("cpu", "cuda")


def check_capacity(
    capacity: int, targets: Sequence[str], precisions: Sequence[str], lowering: str
) -> None:
    """Raise UsageError where no graph could have caches of a fixed capacity."""
    if capacity < 2:
        raise UsageError(f"--cache-capacity is {capacity}", "give 2 or more")
    for target in targets:
        if target not in TARGETS:
            raise UsageError(
                f"--cache-capacity has no graph for {target}",
                f"choose from {', '.join(TARGETS)}, or leave it out",
            )
    if lowering in ("standard", "decomposed"):
        raise UsageError(
            f"--lowering {lowering} copies caches, and --cache-capacity is given",
            "leave one of them out",
        )
    if "bf16" in precisions:
        raise UsageError(
            "--cache-capacity is given, and caches of a bf16 graph are float32 outside",
            "choose fp16, or leave it out",
        )
    if "cuda" in targets and "fp32" in precisions:
        raise UsageError(
            "--cache-capacity is given, and CUDA continues float16 caches alone",
            "add --precision fp16",
        )


def to_graph(spec: ExportSpec, capacity: int | None) -> Graph:
    """Export one component; with a capacity its past may be empty, and as long as fits.

    Errors are `to_onnx`'s.
    """
    if capacity is None and spec.cache_capacity is None:
        return to_onnx(spec)
    spec = completed(replace(spec, cache_capacity=capacity or spec.cache_capacity))
    past, new = cache_axes(spec)
    if not past:
        return to_onnx(replace(spec, cache_capacity=None))
    try:
        return to_onnx(_fitted(spec, past, new, 0))
    except ExportError:  # a model need not run without a past
        return to_onnx(_fitted(spec, past, new, None))


def require_caches(graphs: Mapping[str, Graph], capacity: int | None) -> None:
    """Raise UsageError where a capacity is asked for and no component has a cache that grows."""
    found = False
    for graph in graphs.values():
        caches = growing(graph.model, graph.spec.state) if graph.spec.cache_capacity else ()
        if caches:
            new_tokens(graph.model, caches)
            found = True
    if capacity is not None and not found:
        raise UsageError(
            "--cache-capacity is given, and the model has no cache (B, K, P, H) that grows",
            "leave it out, or name caches past_key_values.N.key and present.N.key",
        )


def _fitted(spec: ExportSpec, past: str, new: str, least: int | None) -> ExportSpec:
    """The spec with what the capacity says of the lengths, its example inside of them."""
    capacity = spec.cache_capacity
    assert capacity is not None

    def bounded(axis: Axis) -> Axis:
        if axis.name == past:
            return replace(axis, min=axis.min if least is None else least, max=capacity - 1)
        return replace(axis, max=min(axis.max, capacity)) if axis.name == new else axis

    dynamic = {
        name: {place: bounded(axis) for place, axis in axes.items()}
        for name, axes in spec.dynamic.items()
    }
    return replace(spec, dynamic=dynamic)
