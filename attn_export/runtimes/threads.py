"""How many threads a runtime may use: what the scheduler and the container grant."""

from __future__ import annotations

import math
import os
from pathlib import Path


def cores() -> int:
    """Cores of this process: its CPU affinity, cut to the control group's quota, at least 1."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(granted or 1, _quota()))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cgroup v2 CPU quota in whole cores, rounded up; a large number where there is none."""
    unlimited = 1 << 20
    if not path.is_file():
        return unlimited
    quota, period = path.read_text().split()
    return unlimited if quota == "max" else math.ceil(int(quota) / int(period))
