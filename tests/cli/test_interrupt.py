"""Ctrl-C and SIGTERM half-way: one sentence, the right code, nothing half-written, no process."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import IO

import pytest

from tests.boundary import SCRIPT, Ended


def stop_when(seen: str, number: int, arguments: list[str], folder: Path) -> Ended:
    """Start a command in a process group of its own, as a terminal does, and signal the group."""
    process = subprocess.Popen(
        [SCRIPT, *arguments, "-v"], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        before = _read_until(process.stderr, seen)
        os.killpg(process.pid, number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert not _alive(process.pid)
    assert "Traceback" not in before + stderr
    return Ended(process.returncode, stdout, stderr)


def _read_until(stream: IO[str], seen: str) -> str:
    lines = []
    for line in stream:
        lines.append(line)
        if seen in line:
            return "".join(lines)
    raise AssertionError(f"never said {seen!r}, but {lines}")


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("seen", ["exporting", "timing, round"])
def test_ctrl_c_during_run_leaves_nothing_and_exits_130(tmp_path: Path, seen: str) -> None:
    ended = stop_when(seen, signal.SIGINT, ["run", "vit-digits", "-o", "out"], tmp_path)
    assert ended.code == 130
    assert ended.stderr.splitlines()[-1] == "Error: Interrupted; nothing half-written was left."
    assert list(tmp_path.iterdir()) == []


def test_sigterm_during_run_leaves_nothing_and_exits_143(tmp_path: Path) -> None:
    ended = stop_when("timing, round", signal.SIGTERM, ["run", "vit-digits", "-o", "out"], tmp_path)
    assert ended.code == 143
    assert ended.stderr.splitlines()[-1] == "Error: Terminated; nothing half-written was left."
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_during_an_overwrite_keeps_the_old_bundle(bundle_copy: Path) -> None:
    before = {path.name: path.read_bytes() for path in bundle_copy.iterdir()}
    arguments = ["run", "vit-digits", "-o", str(bundle_copy), "--overwrite"]
    assert stop_when("verifying", signal.SIGINT, arguments, bundle_copy.parent).code == 130
    assert {path.name: path.read_bytes() for path in bundle_copy.iterdir()} == before
    assert list(bundle_copy.parent.iterdir()) == [bundle_copy]
