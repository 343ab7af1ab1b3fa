"""How many threads a runtime may use: what the scheduler and the container grant."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cores() -> int:
    """Cores of this process: its CPU affinity, cut to the control group's quota, at least 1."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    allowed = quota(CGROUPS, MEMBERSHIP)
    return max(1, granted or 1 if allowed is None else min(granted or 1, math.ceil(allowed)))


def quota(root: Path, membership: Path) -> float | None:
    """The tightest CPU quota of a process's control groups, in cores; None where there is none.

    Args:
        root: where the control groups are mounted, version 1 or 2 or both.
        membership: the process's groups, one `ID:CONTROLLERS:PATH` a line (cgroups(7)). A path that
            is not below `root` is one of the host's, whose container sees its own group as `root`.
    """
    quotas = [
        found
        for line in (membership.read_text().splitlines() if membership.is_file() else ["0::/"])
        for folder in _folders(root, line)
        if (found := _version_2(folder) or _version_1(folder))
    ]
    return min(quotas, default=None)


def _folders(root: Path, line: str) -> Iterator[Path]:
    """The folders that bind a group: its own and those that it lies in."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    mounts = (root / controllers, root / "cpu") if controllers else (root, root / "unified")
    for mount in mounts:
        folder = mount / path.strip("/")
        yield from (part for part in (folder, *folder.parents) if part.is_relative_to(mount))


def _version_2(folder: Path) -> float | None:
    limit = folder / "cpu.max"
    if not limit.is_file():
        return None
    allowed, period = limit.read_text().split()
    return None if allowed == "max" else int(allowed) / int(period)


def _version_1(folder: Path) -> float | None:
    limit, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    if not (limit.is_file() and period.is_file()):
        return None
    allowed = int(limit.read_text())
    return None if allowed <= 0 else allowed / int(period.read_text())
