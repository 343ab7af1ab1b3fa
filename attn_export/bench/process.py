"""A worker process, seen from the parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any, Self

from attn_export import errors
from attn_export.errors import AttnExportError, RuntimeUnavailable

LAST_WORDS = 10_000  # bytes


class WorkerProcess:
    """Starts a worker and asks it, one request at a time."""

    def __init__(self, runtime: str, arguments: list[str]) -> None:
        self.runtime = runtime
        # Not a pipe: one that nobody reads stops who writes to it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "attn_export.bench.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            AttnExportError: the one that the worker raised.
            RuntimeUnavailable: the worker died.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"do": do, **request}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeUnavailable(self._epitaph(do), f"leave {self.runtime} out with --runtime")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            name, observed, way_out = answer["error"]
            kind: type[AttnExportError] = getattr(errors, name)
            raise kind(observed, way_out)
        return answer

    def _epitaph(self, do: str) -> str:
        code = self._process.wait()
        self._log.seek(-min(self._log.seek(0, os.SEEK_END), LAST_WORDS), os.SEEK_END)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        cause = f"killed by signal {-code}" if code < 0 else lines[-1] if lines else f"exit {code}"
        return f"the {self.runtime} process ended during '{do}' ({cause})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
