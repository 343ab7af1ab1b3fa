"""Threads are what the scheduler and the container grant, not what the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_export.runtimes import threads
from attn_export.runtimes.threads import cores, quota

FILES = {
    "own group": ({"cpu.max": "200000 100000"}, "0::/", 2.0),
    "a share of a core": ({"cpu.max": "50000 100000"}, "0::/", 0.5),
    "no quota": ({"cpu.max": "max 100000"}, "0::/", None),
    "no control groups": ({}, "0::/", None),
    "the group around it is tighter": (
        {"pod/cpu.max": "100000 100000", "pod/box/cpu.max": "400000 100000"}, "0::/pod/box", 1.0,
    ),
    "the host's path, seen from inside": ({"cpu.max": "300000 100000"}, "0::/docker/1f2e", 3.0),
    "version 1": (
        {"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
        "7:memory:/\n4:cpu,cpuacct:/", 1.5,
    ),
    "version 1 without a quota": (
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/", None,
    ),
    "version 1, the host's path": (
        {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"},
        "4:cpu,cpuacct:/docker/1f2e\n0::/docker/1f2e", 4.0,
    ),
}  # fmt: skip


@pytest.fixture
def control_groups(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    files, membership, _ = FILES[request.param]
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "membership").write_text(membership + "\n")
    return tmp_path / "cgroup", tmp_path / "membership"


@pytest.mark.parametrize(
    ("control_groups", "allowed"),
    [(name, row[2]) for name, row in FILES.items()],
    indirect=["control_groups"],
)
def test_the_tightest_quota_of_a_containers_groups_is_found(
    control_groups: tuple[Path, Path], allowed: float | None
) -> None:
    assert quota(*control_groups) == allowed


@pytest.mark.parametrize(
    ("control_groups", "found"),
    [("a share of a core", 1), ("version 1", 2), ("own group", 2), ("no quota", 8)],
    indirect=["control_groups"],
)
def test_a_quota_is_rounded_up_to_whole_threads(
    control_groups: tuple[Path, Path], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "CGROUPS", control_groups[0])
    monkeypatch.setattr(threads, "MEMBERSHIP", control_groups[1])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores() == found


def test_no_more_cores_than_the_process_may_use() -> None:
    assert 1 <= cores() <= len(os.sched_getaffinity(0))


def test_a_process_bound_to_one_core_has_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from attn_export.runtimes.threads import cores; print(cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
