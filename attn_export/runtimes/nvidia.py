"""The NVIDIA device and driver of this machine.

`python -m attn_export.runtimes.nvidia` asks libcuda and prints JSON. That is a process of its own,
since a process that has initialised CUDA cannot use it in its forked children.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

from attn_export.runtimes.libraries import locate

DRIVER = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
SECONDS = 30.0
COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True)
class Device:
    """The first device.

    Attributes:
        name: e.g. "NVIDIA L4".
        capability: compute capability, e.g. "8.9".
        cuda: the newest CUDA version that the driver serves, e.g. "13.0".
        count: of all devices.
    """

    name: str
    capability: str
    cuda: str
    count: int

    def __str__(self) -> str:
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"{self.name} (compute capability {self.capability}){more}"


@cache
def device() -> tuple[Device | None, str]:
    """The device, or why there is none, as a clause."""
    if locate([DRIVER])[DRIVER] is None:
        return None, f"there is no NVIDIA driver on this machine ({DRIVER} was not found)"
    command = [sys.executable, "-m", "attn_export.runtimes.nvidia"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"the NVIDIA driver did not answer within {SECONDS:g} s"
    if done.returncode < 0:
        return None, f"asking the NVIDIA driver ended by signal {-done.returncode}"
    return parse(done.stdout)


def parse(text: str) -> tuple[Device | None, str]:
    """What the process printed -> the device, or why there is none."""
    try:
        answer = json.loads(text)
    except ValueError:
        return None, "the NVIDIA driver could not be asked"
    if "error" in answer:
        return None, str(answer["error"])
    return Device(**answer), ""


def _ask() -> dict[str, str | int]:
    try:
        cuda = ctypes.CDLL(DRIVER)
    except OSError as error:
        return {"error": f"the NVIDIA driver does not load ({error})"}
    code = cuda.cuInit(0)
    if code == NO_DEVICE:
        return {"error": "the NVIDIA driver finds no device"}
    if code:
        return {"error": f"the NVIDIA driver does not start (cuInit gives {code})"}
    number, count, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        return {"error": "the NVIDIA driver finds no device"}
    cuda.cuDeviceGet(ctypes.byref(handle), 0)
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), handle)
    parts = []
    for attribute in COMPUTE_CAPABILITY:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        parts.append(str(value.value))
    return {
        "name": name.value.decode(),
        "capability": ".".join(parts),
        "cuda": f"{number.value // 1000}.{number.value % 1000 // 10}",
        "count": count.value,
    }


if __name__ == "__main__":
    print(json.dumps(_ask()))
