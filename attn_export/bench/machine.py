"""What a measurement depends on besides the software: the machine, and what else ran on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.runtimes.threads import CGROUPS, MEMBERSHIP, quota

TELLING_FLAGS = (
    "avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8",
    "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
SAME = ("processor", "cores", "threads", "quota_cores", "system", "flags")
BUSY = 0.5  # load average; a core that is half in use by something else shows in a median
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def machine(threads: int) -> dict[str, Any]:
    """Processor, cores, vector instructions, limits of the container, and the load just now.

    `quota_cores` and `memory_limit_gb` are the control group's, None where it sets none;
    `load_average` is that of the last minute, which a measurement adds to: ask before it.
    """
    cpu = _cpuinfo()
    cores = quota(CGROUPS, MEMBERSHIP)
    return {
        "processor": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "quota_cores": cores,
        "memory_gb": _gigabytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "memory_limit_gb": _memory_limit(),
        "flags": [flag for flag in TELLING_FLAGS if flag in cpu.get("flags", "").split()],
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2),
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What makes two machines too different to compare times, in words."""
    return [
        f"{key} was {one.get(key)} and is {other.get(key)}"
        for key in SAME
        if one.get(key) != other.get(key)
    ]


def _cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """The first processor's entries; ARM calls its flags Features."""
    found: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            key, colon, value = line.partition(":")
            if colon:
                name = "flags" if key.strip() == "Features" else key.strip()
                found.setdefault(name, value.strip())
    return found


def _memory_limit() -> float | None:
    for path in _LIMITS:
        if path.is_file():
            text = path.read_text().strip()
            if text.isdigit() and int(text) < 1 << 60:
                return _gigabytes(int(text))
    return None


def _gigabytes(size: int) -> float:
    return round(size / 1e9, 1)
