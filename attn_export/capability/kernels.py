"""Which op has a kernel on which runtime, from which version on, for which dtypes."""

from __future__ import annotations

from dataclasses import dataclass

from attn_export.capability.form import Version

CONTRIB_ATTENTION = "com.microsoft.Attention"
MULTI_HEAD_ATTENTION = "com.microsoft.MultiHeadAttention"
GROUP_QUERY_ATTENTION = "com.microsoft.GroupQueryAttention"
SPARSE_ATTENTION = "com.microsoft.SparseAttention"
LINEAR_ATTENTION = "com.microsoft.LinearAttention"
CONTRIB_ROTARY = "com.microsoft.RotaryEmbedding"
STANDARD_ATTENTION = "ai.onnx.Attention"
STANDARD_ROTARY = "ai.onnx.RotaryEmbedding"
DECOMPOSED = "decomposed"

CPU, CUDA, TENSORRT, OPENVINO = "ort-cpu", "ort-cuda", "ort-tensorrt", "openvino"
WEB = "ort-web"
RUNTIMES = {
    CPU: "ONNX Runtime",
    CUDA: "ONNX Runtime",
    TENSORRT: "TensorRT",
    OPENVINO: "OpenVINO",
    WEB: "onnxruntime-web",
}
"""Runtime -> whose version decides."""

RAN = "run on ONNX Runtime 1.22 to 1.32"
WEB_RAN = "run on onnxruntime-web 1.30.0, WebAssembly under Node.js 20"
BINARY = "read in the binary of onnxruntime-gpu 1.31.1"


@dataclass(frozen=True)
class Kernel:
    """An op that a runtime has a kernel for.

    Attributes:
        since: the first version known to have it.
        dtypes: of query, key and value.
        source: where this is known from.
    """

    op: str
    runtime: str
    since: Version
    dtypes: tuple[str, ...]
    source: str


SINGLE = ("float32",)
HALF = ("float32", "float16")
ALL = ("float32", "float16", "bfloat16")
SHORT = ("float16", "bfloat16")

KERNELS = (
    Kernel(CONTRIB_ATTENTION, CPU, (1, 17), SINGLE, f"{RAN}; float16 runs through Casts"),
    Kernel(MULTI_HEAD_ATTENTION, CPU, (1, 17), SINGLE, f"{RAN}; float16 runs through Casts"),
    Kernel(GROUP_QUERY_ATTENTION, CPU, (1, 22), HALF, RAN),
    Kernel(SPARSE_ATTENTION, CPU, (1, 22), HALF, BINARY),
    Kernel(LINEAR_ATTENTION, CPU, (1, 31), SINGLE, BINARY),
    Kernel(CONTRIB_ROTARY, CPU, (1, 22), HALF, BINARY),
    Kernel(STANDARD_ATTENTION, CPU, (1, 23), HALF, "run on ONNX Runtime 1.23 to 1.32"),
    Kernel(STANDARD_ROTARY, CPU, (1, 23), HALF, "run on ONNX Runtime 1.23 to 1.32"),
    Kernel(CONTRIB_ATTENTION, CUDA, (1, 17), ALL, BINARY),
    Kernel(MULTI_HEAD_ATTENTION, CUDA, (1, 17), ALL, BINARY),
    Kernel(GROUP_QUERY_ATTENTION, CUDA, (1, 22), SHORT, BINARY),
    Kernel(SPARSE_ATTENTION, CUDA, (1, 22), SHORT, BINARY),
    Kernel(LINEAR_ATTENTION, CUDA, (1, 31), ALL, BINARY),
    Kernel(CONTRIB_ROTARY, CUDA, (1, 22), ALL, BINARY),
    Kernel(STANDARD_ATTENTION, CUDA, (1, 25), ALL,
           "microsoft/onnxruntime #27542; 1.24 runs opset 24 on the CPU without a word (#28025)"),
    Kernel(STANDARD_ROTARY, CUDA, (1, 25), ALL, BINARY),
    Kernel(STANDARD_ATTENTION, TENSORRT, (10, 14), ALL, "release notes of TensorRT 10.14"),
    Kernel(STANDARD_ROTARY, TENSORRT, (10, 15), ALL, "release notes of TensorRT 10.15"),
    Kernel(CONTRIB_ATTENTION, OPENVINO, (2026, 4), SINGLE, "run on OpenVINO 2026.4.1"),
    Kernel(MULTI_HEAD_ATTENTION, OPENVINO, (2026, 4), SINGLE, "run on OpenVINO 2026.4.1"),
    Kernel(GROUP_QUERY_ATTENTION, OPENVINO, (2026, 4), SINGLE, "run on OpenVINO 2026.4.1"),
    Kernel(STANDARD_ATTENTION, OPENVINO, (2026, 4), SINGLE, "run on OpenVINO 2026.4.1"),
    Kernel(CONTRIB_ATTENTION, WEB, (1, 30), SINGLE, WEB_RAN),
    Kernel(MULTI_HEAD_ATTENTION, WEB, (1, 30), SINGLE, WEB_RAN),
    Kernel(GROUP_QUERY_ATTENTION, WEB, (1, 30), HALF, WEB_RAN),
    Kernel(LINEAR_ATTENTION, WEB, (1, 30), SINGLE, WEB_RAN),
    Kernel(CONTRIB_ROTARY, WEB, (1, 30), HALF, WEB_RAN),
    Kernel(STANDARD_ATTENTION, WEB, (1, 30), HALF, WEB_RAN),
    Kernel(STANDARD_ROTARY, WEB, (1, 30), HALF, WEB_RAN),
)  # fmt: skip
"""What is not here has no kernel. Products, softmax and sums are everywhere: `decomposed`."""
