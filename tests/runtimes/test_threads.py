"""Threads are what the scheduler and the container grant, not what the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_export.runtimes.threads import _quota, cores


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("max 100000\n", 1 << 20),
    ],
)
def test_a_containers_quota_is_rounded_up(tmp_path: Path, text: str, granted: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert _quota(tmp_path / "cpu.max") == granted


def test_without_a_quota_nothing_is_cut(tmp_path: Path) -> None:
    assert _quota(tmp_path / "none") == 1 << 20


def test_no_more_cores_than_the_process_may_use() -> None:
    assert 1 <= cores() <= len(os.sched_getaffinity(0))


def test_a_process_bound_to_one_core_has_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from attn_export.runtimes.threads import cores; print(cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
