"""Which runtimes work here: each is told apart by running a small attention model on it.

Each runtime is probed in a process of its own, with a time limit, so that a crash in one library
says something about that runtime and nothing about the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attn_export.bench.machine import machine
from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes import ort_cpu, table
from attn_export.runtimes.packages import versions
from attn_export.runtimes.threads import cores

PASS, FAIL, UNAVAILABLE = "pass", "fail", "unavailable"
SECONDS = 180.0
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """What was seen of one runtime.

    Attributes:
        status: "pass" where the model ran and its answers were right, "fail" where not,
            "unavailable" where it was not run.
        observed, fix: what was seen, and the one thing that helps, unless it passed.
        ms: of loading and running the model.
    """

    runtime: str
    status: str
    observed: str = ""
    fix: str = ""
    ms: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str | None] = field(default_factory=dict)
    device: str = ""
    driver: str = ""

    @property
    def missing(self) -> list[str]:
        return [name for name, path in self.libraries.items() if path is None]


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found."""

    findings: Sequence[Finding]
    asked: Sequence[str] = ()

    @property
    def needed(self) -> list[Finding]:
        """The runtimes that must work: those that were asked for, or the CPU."""
        names = self.asked or [ort_cpu.NAME]
        return [finding for finding in self.findings if finding.runtime in names]

    @property
    def passed(self) -> bool:
        return all(finding.status == PASS for finding in self.needed)

    def require(self) -> None:
        """Raise RuntimeUnavailable unless the runtimes that must work do."""
        for found in self.needed:
            if found.status != PASS:
                verb = "is not available" if found.status == UNAVAILABLE else "does not work"
                raise RuntimeUnavailable(
                    f"{found.runtime} {verb} because {found.observed}", found.fix
                )

    def to_json(self) -> dict[str, Any]:
        """The `doctor --json` object."""
        rows = {finding.runtime: asdict(finding) for finding in self.findings}
        for row in rows.values():
            del row["runtime"]
        return {
            "runtimes": rows,
            "passed": self.passed,
            "machine": machine(cores()),
            "versions": versions(),
        }


def diagnose(
    runtimes: Sequence[str] = (),
    *,
    seconds: float = SECONDS,
    progress: Progress = lambda _: None,
) -> Diagnosis:
    """Probe the runtimes, all of them by default.

    Args:
        seconds: how long one may take.

    Raises:
        UsageError: there is no such runtime.
    """
    for name in runtimes:
        if name not in table.MODULE_RUNTIMES:
            table.find(name)
    findings = []
    for name in dict.fromkeys(runtimes or table.names()):
        progress(f"trying {name}")
        findings.append(probe(name, seconds))
    return Diagnosis(findings, tuple(runtimes))


def probe(
    runtime: str, seconds: float = SECONDS, module: str = "attn_export.doctor.probe"
) -> Finding:
    """One runtime, in a process of its own: `python -m MODULE RUNTIME` prints a Finding as JSON."""
    command = [sys.executable, "-m", module, runtime]
    leave = "leave this runtime out, or reinstall its packages"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Finding(runtime, FAIL, f"it did not answer within {seconds:g} s", leave)
    if done.returncode < 0:
        return Finding(runtime, FAIL, f"its process was ended by signal {-done.returncode}", leave)
    for line in reversed(done.stdout.splitlines()):  # a library may print after it
        if line.startswith("{"):
            return Finding(runtime, **json.loads(line))
    words = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return Finding(runtime, FAIL, f"its process ended without an answer ({words})", leave)
