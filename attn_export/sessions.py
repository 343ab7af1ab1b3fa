"""Load a component of a bundle on a runtime, or on one that stands in for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attn_export import bundle as bundles
from attn_export.capability import TARGET_RUNTIMES
from attn_export.errors import RuntimeUnavailable, UsageError
from attn_export.runtimes import openvino, ort_cpu, torch_eager
from attn_export.runtimes.base import Availability, GraphBytes, Session, TensorSpec

RUNTIMES = tuple(dict.fromkeys([torch_eager.NAME, *TARGET_RUNTIMES.values()]))
STAND_IN = ort_cpu.NAME
AVAILABILITY: dict[str, Callable[[], Availability]] = {
    module.NAME: module.availability for module in (torch_eager, ort_cpu, openvino)
}


def availability(runtime: str) -> Availability:
    """Whether a runtime can work here.

    Raises:
        UsageError: there is no such runtime.
    """
    if runtime in AVAILABILITY:
        return AVAILABILITY[runtime]()
    if runtime in RUNTIMES:
        return Availability(
            runtime, False, f"this version of attn-export does not run {runtime}",
            f"run its graph where {runtime} is, with ONNX Runtime itself",
        )  # fmt: skip
    raise UsageError(f"there is no runtime '{runtime}'", f"the runtimes are {', '.join(RUNTIMES)}")


def available(runtimes: Sequence[str]) -> tuple[list[str], dict[str, RuntimeUnavailable]]:
    """Those that can work here, and why the others cannot."""
    found = {runtime: availability(runtime) for runtime in runtimes}
    missing = {
        runtime: RuntimeUnavailable(seen.observed, seen.fix)
        for runtime, seen in found.items()
        if not seen.ok
    }
    return [runtime for runtime in found if runtime not in missing], missing


def load(
    bundle: bundles.Bundle,
    runtime: str,
    component: str = "model",
    threads: int | None = None,
    source: str | None = None,
    graph: bytes | None = None,
) -> Session:
    """A session of one component on one runtime.

    Args:
        source: torch's, instead of the manifest's.
        graph: serialized, with the bundle's weights; runs instead of the bundle's own.

    Raises:
        UsageError: an unknown runtime, or one that the bundle was not exported for.
        RuntimeUnavailable: it cannot work here.
    """
    if runtime not in RUNTIMES:
        known = ", ".join(RUNTIMES)
        raise UsageError(f"there is no runtime '{runtime}'", f"the runtimes are {known}")
    if runtime == torch_eager.NAME:
        return _load_torch(bundle, component, source)
    target = bundle.target_for(runtime, component)
    _, missing = available([runtime])
    if missing:
        raise missing[runtime]
    model = bundle.model_path(target) if graph is None else GraphBytes(graph, bundle.path)
    if runtime == openvino.NAME:
        return openvino.load(model, threads)
    return ort_cpu.load(model, threads)


def load_stand_in(
    bundle: bundles.Bundle, target: Mapping[str, Any], graph: bytes | None = None
) -> Session:
    """The graph of a target whose runtime is not here, on ONNX Runtime's CPU provider.

    What that shows is that the graph computes what PyTorch does, not that the runtime would.
    """
    model = bundle.model_path(target) if graph is None else GraphBytes(graph, bundle.path)
    return ort_cpu.load(model)


def _load_torch(bundle: bundles.Bundle, component: str, source: str | None) -> Session:
    torch_eager.require()
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
    return torch_eager.TorchSession(spec.module, inputs, outputs, spec.names)


def _example_shape(spec: TensorSpec) -> str:
    """Sizes for a factory that returns a module alone, as --input gave them for the export."""
    return ",".join(str(size) if isinstance(size, int) else "2" for size in spec.shape)
