"""Load a component of a bundle on a runtime, or on one that stands in for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attn_export import bundle as bundles
from attn_export.errors import UsageError
from attn_export.extras import require
from attn_export.fixed_caches import FixedCaches, grown
from attn_export.precision.names import DTYPES
from attn_export.precision.stored import as_stored
from attn_export.precision.views import view
from attn_export.runtimes import ort_cpu, table, torch_compile
from attn_export.runtimes.base import (
    DEFAULTS,
    Graph,
    GraphBytes,
    LoadOptions,
    Session,
    TensorSpec,
)
from attn_export.runtimes.growing import Growing
from attn_export.runtimes.torch_eager import TorchSession
from attn_export.tuned import applied, threads_of

STAND_IN = ort_cpu.NAME


def load(
    bundle: bundles.Bundle,
    runtime: str,
    component: str = "model",
    threads: int | None = None,
    source: str | None = None,
    options: LoadOptions = DEFAULTS,
    graph: bytes | None = None,
    *,
    raw: bool = False,
) -> Session:
    """A session of one component on one runtime.

    Caches of a fixed capacity look as if they grew, which is how cases are stored.

    Args:
        threads: those that were tuned where it is left out, else all cores.
        source: torch's, instead of the manifest's.
        options: settings that they leave open are the tuned ones.
        graph: serialized, with the bundle's weights; runs instead of the bundle's own.
        raw: caches of a fixed capacity are the graph's own buffers.

    Raises:
        UsageError: an unknown runtime, or one that the bundle was not exported for.
        RuntimeUnavailable: it cannot work here.
    """
    bundle, runtime = view(bundle, runtime)
    if not raw:
        bundle = as_grown(bundle)
    if runtime in table.MODULE_RUNTIMES:
        return _promised(bundle, component, _load_torch(bundle, runtime, component, source))
    found = table.find(runtime)
    table.require(runtime)
    target = bundle.target_for(found.GRAPHS, component)
    options, threads = applied(options, target), threads or threads_of(target)
    if not options.ranges:
        options = replace(options, ranges=_ranges(bundle, component))
    loaded = as_stored(found.load(_model(bundle, target, graph), threads, options), target)
    return _with_caches(bundle, component, _promised(bundle, component, loaded), raw)


def as_grown(bundle: bundles.Bundle) -> bundles.Bundle:
    """The bundle as if its caches grew: cases are stored that way."""
    return replace(bundle, manifest=grown(bundle.manifest))


def _with_caches(bundle: bundles.Bundle, component: str, session: Session, raw: bool) -> Session:
    caches = FixedCaches.of(bundle.manifest, component)
    if caches is None:
        return session
    if raw:
        session.caches = caches
        return session
    return growing(bundle, component, session)


def growing(bundle: bundles.Bundle, component: str, session: Session) -> Session:
    """A raw session of a component as one whose caches grow, if it has any of fixed capacity."""
    caches = FixedCaches.of(bundle.manifest, component)
    return session if caches is None else Growing(session, caches)


def _model(bundle: bundles.Bundle, target: Mapping[str, Any], graph: bytes | None) -> Graph:
    return bundle.model_path(target) if graph is None else GraphBytes(graph, bundle.path)


def _ranges(bundle: bundles.Bundle, component: str) -> dict[str, tuple[int, int]]:
    """Symbolic size -> its bounds, of a component's inputs."""
    return {
        size: (int(low), int(high))
        for entry in bundle.manifest["inputs"]
        if entry["component"] == component
        for size, (low, high) in entry.get("ranges", {}).items()
    }


def load_stand_in(
    bundle: bundles.Bundle, target: Mapping[str, Any], graph: bytes | None = None
) -> Session:
    """The graph of a target whose runtime is not here, on ONNX Runtime's CPU provider.

    What that shows is that the graph computes what PyTorch does, not that the runtime would.
    """
    model, loaded = _model(bundle, target, graph), None
    if target["precision"] in DTYPES:  # the CPU provider would not round as a device does
        require("graph")
        from attn_export.precision.stand_in import stand_in_bytes

        loaded = ort_cpu.load(stand_in_bytes(model), optimize=False)
    component = str(target["component"])
    promised = _promised(as_grown(bundle), component, loaded or ort_cpu.load(model))
    return _with_caches(as_grown(bundle), component, promised, raw=False)


def _promised(bundle: bundles.Bundle, component: str, session: Session) -> Session:
    """The session, which refuses inputs that break what was promised at export."""
    session.right_padded = {
        entry["name"]: 0 if entry.get("keeps") == 0 else 1
        for entry in bundle.manifest["inputs"]
        if entry["component"] == component and entry.get("right_padded")
    }
    return session


def _load_torch(
    bundle: bundles.Bundle, runtime: str, component: str, source: str | None
) -> Session:
    table.require(runtime)
    from attn_export.source import resolve

    inputs = [
        TensorSpec(entry["name"], entry["dtype"], tuple(entry["shape"]))
        for entry in bundle.manifest["inputs"]
        if entry["component"] == component
    ]
    examples = [f"{spec.name}={spec.dtype}[{_example_shape(spec)}]" for spec in inputs]
    components = resolve(source or str(bundle.manifest["source"]), examples).components
    if component not in components:
        raise UsageError(
            f"{source or bundle.manifest['source']} has no component '{component}'",
            "name the model that the bundle was exported from with --source",
        )
    spec = components[component]
    outputs = [o["name"] for o in bundle.manifest["outputs"] if o["component"] == component]
    kind = torch_compile.CompiledSession if runtime == torch_compile.NAME else TorchSession
    return kind(spec.module, inputs, outputs, spec.names)


def _example_shape(spec: TensorSpec) -> str:
    """Sizes for a factory that returns a module alone, as --input gave them for the export."""
    return ",".join(str(size) if isinstance(size, int) else "2" for size in spec.shape)
