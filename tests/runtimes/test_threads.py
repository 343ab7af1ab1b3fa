"""Threads are what the scheduler and the container grant, not what the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_export.runtimes.threads import cores, quota


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("200000 100000\n", 2.0),
        ("150000 100000\n", 1.5),
        ("50000 100000\n", 0.5),
        ("max 100000\n", None),
    ],
)
def test_a_containers_quota_in_cores(tmp_path: Path, text: str, granted: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert quota(tmp_path / "cpu.max") == granted


def test_without_a_quota_nothing_is_cut(tmp_path: Path) -> None:
    assert quota(tmp_path / "none") is None


@pytest.mark.parametrize(("granted", "threads"), [(1.5, 2), (0.5, 1), (None, 4)])
def test_a_quota_is_rounded_up(
    granted: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_export.runtimes.threads.quota", lambda: granted)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert cores() == threads


def test_no_more_cores_than_the_process_may_use() -> None:
    assert 1 <= cores() <= len(os.sched_getaffinity(0))


def test_a_process_bound_to_one_core_has_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from attn_export.runtimes.threads import cores; print(cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
