"""An NVIDIA driver that is none: a library compiled here, which answers as libcuda does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strcpy(name, "Fake L4"); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 8 : 9;
    return 0;
}
"""
LIBRARIES = (
    "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudart.so.13", "libcudnn.so.9",
    "libnvinfer.so.10", "libnvonnxparser.so.10",
)  # fmt: skip


def fake_driver(folder: Path, *, init: int = 0, version: int = 13000, count: int = 1) -> Path:
    """A folder for LD_LIBRARY_PATH with a libcuda.so.1 in it."""
    source = folder / "driver.c"
    source.write_text(DRIVER)
    macros = [f"-DINIT={init}", f"-DVERSION={version}", f"-DCOUNT={count}"]
    target = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", *macros, "-o", target, source], check=True)
    return folder


def fake_libraries(folder: Path, *names: str) -> None:
    """Files that have the name of a library, and nothing in them."""
    for name in names:
        (folder / name).touch()
