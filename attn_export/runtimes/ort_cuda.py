"""ort-cuda: ONNX Runtime's CUDA execution provider."""

from __future__ import annotations

from attn_export.runtimes import libraries
from attn_export.runtimes.base import DEFAULTS, Availability, Graph, LoadOptions
from attn_export.runtimes.nvidia_stack import examine
from attn_export.runtimes.ort import CPU, OrtSession, Provider
from attn_export.runtimes.threads import cores

NAME = "ort-cuda"
GRAPHS = (NAME,)
PROVIDER = "CUDAExecutionProvider"

OPTIONS = {
    "use_tf32": "0",  # tf32 keeps 10 bits of the mantissa, which is no parity with float32
    "arena_extend_strategy": "kSameAsRequested",  # powers of two take up to twice the memory
    "cudnn_conv_algo_search": "HEURISTIC",  # the exhaustive search is paid at each new shape
}
"""Provider options that differ from ONNX Runtime's own; its documentation calls them by name."""


def availability() -> Availability:
    return examine(NAME, PROVIDER, "cuda")


def provider(options: LoadOptions) -> Provider:
    """The CUDA provider with its options, those of the caller last."""
    return Provider(PROVIDER, {**OPTIONS, **options.provider})


def load(model: Graph, threads: int | None = None, options: LoadOptions = DEFAULTS) -> OrtSession:
    """As `Runtime.load`. Nodes without a CUDA kernel run on the CPU; attention must not."""
    found = availability()
    found.require()
    libraries.preload(found.libraries)
    chosen = [provider(options), CPU]
    return OrtSession(NAME, model, chosen, threads or cores(), options)
