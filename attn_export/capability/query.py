"""Ask the table whether an op may be used, and what it answers on blocked rows."""

from __future__ import annotations

from attn_export.capability.form import Form, Refusal, parse_version
from attn_export.capability.kernels import DECOMPOSED, KERNELS, RUNTIMES, Kernel
from attn_export.capability.limits import LIMITS, Limit


def why_not(op: str, runtime: str, version: str, form: Form) -> Refusal | None:
    """The first reason why `op` may not compute `form` there; None where it may.

    Args:
        op: its domain and name, or "decomposed".
        runtime: "ort-cpu", "ort-cuda", "ort-tensorrt", "openvino" or "ort-web".
        version: of ONNX Runtime, TensorRT, OpenVINO or onnxruntime-web, as `kernels.RUNTIMES` says.
    """
    if op == DECOMPOSED:
        return None
    kernel = next((k for k in KERNELS if k.op == op and k.runtime == runtime), None)
    if kernel is None:
        return Refusal("no-kernel", f"{runtime} has no kernel for {op}", _absent(op, runtime))
    if parse_version(version) < kernel.since:
        return Refusal("no-kernel", _too_old(kernel, version), kernel.source)
    if form.dtype not in kernel.dtypes:
        words = f"{op} has no {form.dtype} kernel on {runtime}"
        return Refusal("no-kernel", words, kernel.source)
    limit = next((found for found in LIMITS if _holds(found, op, runtime, version, form)), None)
    return None if limit is None else Refusal(limit.code, f"{op} {limit.words}", limit.source)


def _too_old(kernel: Kernel, version: str) -> str:
    needed = ".".join(map(str, kernel.since))
    return f"{kernel.op} needs {RUNTIMES[kernel.runtime]} {needed}, this is {version}"


def _absent(op: str, runtime: str) -> str:
    if runtime == "ort-tensorrt" and op.startswith("com.microsoft"):
        return "TensorRT's parser imports no com.microsoft op, NVIDIA/TensorRT #3558"
    return "not in the table of kernels"


def _holds(limit: Limit, op: str, runtime: str, version: str, form: Form) -> bool:
    number = parse_version(version)
    return (
        limit.op == op
        and runtime in limit.runtimes
        and limit.since <= number
        and (limit.before is None or number < limit.before)
        and all(form.has(feature) for feature in limit.when)
    )
