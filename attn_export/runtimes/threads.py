"""How many threads a runtime may use: what the scheduler and the container grant."""

from __future__ import annotations

import math
import os
from pathlib import Path


def cores() -> int:
    """Cores of this process: its CPU affinity, cut to the control group's quota, at least 1."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = quota()
    return max(1, (granted or 1) if limit is None else min(granted or 1, math.ceil(limit)))


def quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """The cgroup v2 CPU quota in cores; None where there is none."""
    if not path.is_file():
        return None
    granted, period = path.read_text().split()
    return None if granted == "max" else int(granted) / int(period)
