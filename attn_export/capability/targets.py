"""What `--target` names: a runtime, and the version that is assumed where it is not installed."""

from __future__ import annotations

from dataclasses import dataclass

from attn_export.capability.kernels import CPU, CUDA, OPENVINO, TENSORRT, WEB


@dataclass(frozen=True)
class Target:
    """Where a graph is to run.

    Attributes:
        packages: that the version is read from, whichever is installed; `npm:` is for Node.js.
        pinned: the version that production is to have.
    """

    name: str
    runtime: str
    packages: tuple[str, ...]
    pinned: str


TARGETS = {
    target.name: target
    for target in (
        Target("cpu", CPU, ("onnxruntime", "onnxruntime-gpu"), "1.31.1"),
        Target("cuda", CUDA, ("onnxruntime-gpu",), "1.31.1"),
        Target("tensorrt", TENSORRT, ("tensorrt-cu13",), "10.16.1.11"),
        Target("openvino", OPENVINO, ("openvino",), "2026.4.1"),
        Target("web", WEB, ("npm:onnxruntime-web",), "1.30.0"),
    )
}

TARGET_RUNTIMES = {target.name: target.runtime for target in TARGETS.values()}
