"""Load a component of a bundle on a runtime."""

from __future__ import annotations

from attn_export import bundle as bundles
from attn_export.errors import UsageError
from attn_export.runtimes import ort_cpu, torch_eager
from attn_export.runtimes.base import Session, TensorSpec

RUNTIMES = (torch_eager.NAME, ort_cpu.NAME)


def load(
    bundle: bundles.Bundle,
    runtime: str,
    component: str = "model",
    threads: int | None = None,
    source: str | None = None,
) -> Session:
    """A session of one component on one runtime; `source` is torch's, instead of the manifest's.

    Raises:
        UsageError: an unknown runtime, or one that the bundle was not exported for.
        RuntimeUnavailable: it cannot work here.
    """
    if runtime == ort_cpu.NAME:
        path = bundle.model_path(bundle.target_for(runtime, component))
        return ort_cpu.load(path, threads)
    if runtime == torch_eager.NAME:
        return _load_torch(bundle, component, source)
    raise UsageError(f"there is no runtime '{runtime}'", f"the runtimes are {', '.join(RUNTIMES)}")


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
