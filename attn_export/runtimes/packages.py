"""Versions of packages, and which one owns the `onnxruntime` folder.

Two owners overwrite each other's files.
"""

from __future__ import annotations

import platform
from importlib import metadata

from attn_export.capability import TARGETS
from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes import node

NPM = "npm:"
NODE_PACKAGES = ("onnxruntime-web",)
OWNERS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-migraphx",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-training",
    "onnxruntime-webgpu",
)


def version(package: str) -> str | None:
    """The installed version of a distribution, None where it is not installed; `npm:NAME` is one of
    Node.js."""
    if package.startswith(NPM):
        found = node.package(package.removeprefix(NPM))
        return found[1] if found else None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def runtime_version(runtime: str) -> tuple[str, bool]:
    """The version that decides what a runtime can do, and whether it is only assumed.

    Installed here, or else the one that production pins.
    """
    target = next(target for target in TARGETS.values() if target.runtime == runtime)
    for package in target.packages:
        if found := version(package):
            return found, False
    return target.pinned, True


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that an answer depends on."""
    packages = ("attn-export", "torch", "onnx", "onnx-ir", "onnxscript", "numpy", *OWNERS)
    found = {name: number for name in packages if (number := version(name))}
    for name in NODE_PACKAGES:
        if number := version(f"{NPM}{name}"):
            found[name] = number
    return {"python": platform.python_version(), **found}


def onnxruntime_owner() -> tuple[str, str]:
    """Name and version of the one package that owns `onnxruntime`.

    Raises:
        RuntimeUnavailable: none is installed, or more than one is.
    """
    found = {name: found for name in OWNERS if (found := version(name))}
    if not found:
        raise RuntimeUnavailable(
            "no onnxruntime package is installed",
            "run `pip install 'attn-export[cpu]'`, or [gpu] on a machine with an NVIDIA GPU",
        )
    if len(found) > 1:
        names = " ".join(found)
        keep = next((name for name in found if name != "onnxruntime"), "onnxruntime")
        raise RuntimeUnavailable(
            f"{' and '.join(f'{name} {number}' for name, number in found.items())} are both"
            " installed and own the same folder",
            f"run `pip uninstall -y {names} && pip install {keep}`",
        )
    return next(iter(found.items()))
