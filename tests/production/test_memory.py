"""A process that serves does not grow: `benchmarks/memory_soak.py`, whose bounds these are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.boundary import ROOT, Ended, run


def soak(bundle: Path, runs: int, sessions: int) -> Ended:
    script = ROOT / "benchmarks" / "memory_soak.py"
    command = [sys.executable, script, bundle, "--runs", runs, "--sessions", sessions, "--check"]
    return run(
        list(map(str, command)),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_memory_stays_over_lengths_and_over_sessions(decoder_bundle: Path) -> None:
    ended = soak(decoder_bundle, 300, 10)
    assert (ended.code, ended.stderr) == (0, "")
    assert [line.split(":")[0] for line in ended.stdout.splitlines()] == ["300 runs", "10 sessions"]


@pytest.mark.slow
def test_memory_stays_over_2000_runs_and_50_sessions(decoder_bundle: Path) -> None:
    ended = soak(decoder_bundle, 2000, 50)
    assert (ended.code, ended.stderr) == (0, "")
