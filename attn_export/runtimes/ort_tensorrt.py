"""ort-tensorrt: ONNX Runtime's TensorRT execution provider, on graphs of standard ops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes import graphs, libraries, ort_cuda
from attn_export.runtimes import tensorrt_plan as plan
from attn_export.runtimes.base import DEFAULTS, Availability, Graph, LoadOptions, TensorSpec
from attn_export.runtimes.nvidia_stack import examine
from attn_export.runtimes.ort import CPU, OrtSession, Provider
from attn_export.runtimes.threads import cores

NAME = "ort-tensorrt"
GRAPHS = (NAME,)
PROVIDER = "TensorrtExecutionProvider"
COMPILED = "compiled_ctx.onnx"


def availability() -> Availability:
    return examine(NAME, PROVIDER, "tensorrt")


def provider(
    model: Graph,
    inputs: Sequence[TensorSpec],
    options: LoadOptions,
    versions: str,
    device: str,
) -> Provider:
    """The TensorRT provider with its options, those of the caller last.

    Engines are kept in a folder of this graph alone, timings in one that all graphs share.

    Raises:
        UsageError: a size without a range, or an option that changes the precision.
    """
    plan.refuse_precision(options.provider)
    chosen = {**plan.profiles(inputs, options.ranges), **options.provider}
    key = plan.cache_key(model, chosen, versions, device)
    folder = plan.cache_folder(options.cache)
    kept = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder / key),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder / "timings"),
    }
    return Provider(PROVIDER, {**kept, **chosen})


def ahead_of_time(found: Provider) -> Provider:
    """The same provider, told to write its engines as a model that is loaded without TensorRT's
    builder (ONNX Runtime's EP context). ONNX Runtime wants a relative engine folder then."""
    folder = Path(found.options["trt_engine_cache_path"])
    written = {
        "trt_dump_ep_context_model": "1",
        "trt_ep_context_file_path": str(folder / COMPILED),
        "trt_engine_cache_path": "engines",
    }
    return Provider(found.name, {**found.options, **written})


def compile_ahead(model: Path, threads: int | None = None, options: LoadOptions = DEFAULTS) -> Path:
    """Build the engines of a graph; `load` with the same options then builds nothing.

    Raises:
        RuntimeUnavailable, FileError, UsageError: as `load`.
        RuntimeUnavailable: TensorRT did not take the whole graph, so that nothing was written.
    """
    chosen = _prepared(model, options)
    path = Path(chosen.options["trt_engine_cache_path"], COMPILED)
    path.parent.mkdir(parents=True, exist_ok=True)
    _session(model, ahead_of_time(chosen), threads, options).close()
    if not path.is_file():
        raise RuntimeUnavailable(
            f"TensorRT did not take all of {model.name}, so no engine could be written",
            "load it as it is, with its engines cached",
        )
    return path


def load(model: Graph, threads: int | None = None, options: LoadOptions = DEFAULTS) -> OrtSession:
    """As `Runtime.load`. What TensorRT does not take runs on CUDA or the CPU; attention must not.

    Engines are built here, not at the first request, unless this graph was loaded before with the
    same options on the same device. A request outside of the ranges is refused.

    Raises:
        FileError: ONNX Runtime refuses the graph.
        UsageError: the graph has com.microsoft ops, a size has no range, or an option changes the
            precision.
    """
    chosen = _prepared(model, options)
    compiled = Path(chosen.options["trt_engine_cache_path"], COMPILED)
    return _session(compiled if compiled.is_file() else model, chosen, threads, options)


def _prepared(model: Graph, options: LoadOptions) -> Provider:
    found = availability()
    graph = graphs.read(model)
    graphs.refuse_foreign(graph, NAME)
    found.require()
    libraries.preload(found.libraries)
    versions = f"{dict(found.versions)} TensorRT {tensorrt_version(found)}"
    return provider(model, graphs.inputs(graph), options, versions, found.device)


def _session(
    model: Graph, chosen: Provider, threads: int | None, options: LoadOptions
) -> OrtSession:
    providers = [chosen, ort_cuda.provider(DEFAULTS), CPU]
    return OrtSession(NAME, model, providers, threads or cores(), options, ranges=options.ranges)


def tensorrt_version(found: Availability) -> int:
    """What libnvinfer says of itself, e.g. 101601: the engines are its own."""
    path = next(str(p) for name, p in found.libraries.items() if name.startswith("libnvinfer.so"))
    return int(libraries.loaded(path).getInferLibVersion())
