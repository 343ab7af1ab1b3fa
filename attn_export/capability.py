"""What each attention op may do on each runtime: data with its source. Needs numpy alone."""

from __future__ import annotations

from dataclasses import dataclass

CONTRIB_ATTENTION = "com.microsoft.Attention"
MULTI_HEAD_ATTENTION = "com.microsoft.MultiHeadAttention"
STANDARD_ATTENTION = "ai.onnx.Attention"


@dataclass(frozen=True)
class Kernel:
    """An op that a runtime has a kernel for.

    Attributes:
        since: the first runtime version that has it and is right.
        dtypes: of query, key and value.
        source: where this is known from.
    """

    op: str
    runtime: str
    since: tuple[int, int]
    dtypes: frozenset[str]
    source: str


KERNELS = (
    Kernel(
        CONTRIB_ATTENTION, "ort-cpu", (1, 17), frozenset({"float32"}),
        "run on ONNX Runtime 1.22 to 1.32; float16 runs through inserted Casts",
    ),
    Kernel(
        MULTI_HEAD_ATTENTION, "ort-cpu", (1, 17), frozenset({"float32"}),
        "run on ONNX Runtime 1.22 to 1.32; float16 runs through inserted Casts",
    ),
    Kernel(
        STANDARD_ATTENTION, "ort-cpu", (1, 28), frozenset({"float32", "float16"}),
        "ONNX Runtime 1.28 gives 0 on blocked rows as PyTorch does; 1.26 leaks softcapped keys",
    ),
)  # fmt: skip

PREFERENCE = {"ort-cpu": (CONTRIB_ATTENTION, MULTI_HEAD_ATTENTION, STANDARD_ATTENTION)}
"""Ops from the one that is usually fastest on."""

TARGET_RUNTIMES = {"cpu": "ort-cpu"}


def why_not(op: str, runtime: str, version: str, dtype: str) -> str:
    """The reason why `op` may not be used there; empty where it may."""
    kernel = next((k for k in KERNELS if k.op == op and k.runtime == runtime), None)
    if kernel is None:
        return f"{runtime} has no kernel for {op}"
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < kernel.since:
        return f"{op} needs ONNX Runtime {kernel.since[0]}.{kernel.since[1]}, this is {version}"
    if dtype not in kernel.dtypes:
        return f"{op} has no {dtype} kernel on {runtime}"
    return ""
