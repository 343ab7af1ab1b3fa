"""Whether one of ONNX Runtime's NVIDIA providers can work here: package, device, libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes import libraries, nvidia
from attn_export.runtimes.base import Availability
from attn_export.runtimes.ort import import_onnxruntime
from attn_export.runtimes.packages import onnxruntime_owner, version

LAZY = {"cuda": ["libcudnn.so.9"], "tensorrt": []}
"""Not named in the header since it is loaded when first needed, as by a convolution."""
TENSORRT_WHEEL = "tensorrt-cu13==10.16.1.11"


def examine(runtime: str, provider: str, key: str) -> Availability:
    """What was seen of one provider; `key` is "cuda" or "tensorrt"."""
    try:
        ort = import_onnxruntime()
    except RuntimeUnavailable as error:
        return Availability(runtime, False, error.observed, error.way_out)
    owner, number = onnxruntime_owner()
    package = f"{owner} {number}"
    versions = {owner: number}
    if key == "tensorrt" and (installed := version("tensorrt-cu13")):
        versions["tensorrt-cu13"] = installed
    library = libraries.provider_library(key)
    found = {} if library is None else libraries.locate(_names(library, key))
    device, why = nvidia.device()
    if device is None:
        observed, fix = why, "run it on a machine with an NVIDIA GPU, or leave this runtime out"
    elif provider not in ort.get_available_providers() or library is None:
        observed = f"{package} has no {provider}"
        fix = f"run `pip uninstall -y {owner} && pip install 'attn-export[{key}]'`"
    else:
        observed, fix = diagnose(package, found, device.cuda, key)
    return Availability(
        runtime, not observed, observed, fix, versions, found,
        str(device) if device else "", f"CUDA {device.cuda}" if device else "",
    )  # fmt: skip


def _names(library: Path, key: str) -> list[str]:
    """Libraries that a provider needs; the TensorRT one is used next to the CUDA one."""
    names = libraries.wanted(library)
    if key == "tensorrt":
        names += libraries.wanted(library.with_name("libonnxruntime_providers_cuda.so"))
    return list(dict.fromkeys([*names, *LAZY[key]]))


def diagnose(
    package: str, found: Mapping[str, str | None], driver_cuda: str, extra: str
) -> tuple[str, str]:
    """What is wrong with the libraries or the driver, and the way out; nothing where all is well.

    Args:
        package: name and version of the onnxruntime package.
        found: library -> its path, None where it is missing.
        driver_cuda: the newest CUDA version that the driver serves.
    """
    missing = [name for name, path in found.items() if path is None]
    install = f"run `pip install 'attn-export[{extra}]'`"
    infer = next((name for name in missing if name.startswith("libnvinfer")), None)
    other = libraries.other_major(infer) if infer else None
    if infer and other:
        major = infer.rpartition(".")[2]
        return (
            f"TensorRT {other[0]} is installed and {package} is built for TensorRT {major}",
            f"run `pip install {TENSORRT_WHEEL}`",
        )
    if missing:
        seen = f"{package} needs {' and '.join(missing)}, which was not found"
        stray = next(filter(None, map(libraries.other_major, missing)), None)
        return f"{seen}, while {stray[1]} is of another major version" if stray else seen, install
    runtime = next((n for n in found if n.startswith("libcudart.so.")), "")
    major = re.sub(r"\D", "", runtime.rpartition(".")[2])
    if major and int(major) > int(driver_cuda.partition(".")[0]):
        return (
            f"the NVIDIA driver serves CUDA {driver_cuda} and {package} is built for CUDA {major}",
            "update the driver",
        )
    return "", ""
