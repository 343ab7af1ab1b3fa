"""A Node process that answers messages made of a JSON head and tensors; `web/worker.mjs` is one."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import RuntimeUnavailable, UsageError
from attn_export.runtimes.base import Arrays

LAST_WORDS = 10_000  # bytes


class Refused(Exception):
    """The worker could not do what it was asked; the text says why."""


class NodeProcess:
    """Starts a script and asks it, one request at a time; it ends with this object."""

    def __init__(self, command: list[str]) -> None:
        """`command` gets the descriptor for answers as its last argument.

        Raises:
            RuntimeUnavailable: it does not start.
        """
        # Not a pipe: one that nobody reads stops who writes to it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
        answers, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs],
            )
        except OSError as error:
            os.close(answers)
            self._log.close()
            raise RuntimeUnavailable(
                f"{command[0]} does not start ({error.strerror})", "install Node.js again"
            ) from error
        finally:
            os.close(theirs)
        self._answers: BufferedReader = os.fdopen(answers, "rb")
        self._lock, self._owner = threading.Lock(), os.getpid()
        self.close = weakref.finalize(
            self, _end, self._process, self._answers, self._log, self._owner
        )
        """Ends the process; called as well when this object is forgotten, and at exit."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self, do: str, tensors: Mapping[str, NDArray[np.generic]] | None = None, **request: Any
    ) -> tuple[dict[str, Any], Arrays]:
        """Send a request and wait for the answer's head and tensors.

        Raises:
            Refused: the worker says why it could not.
            RuntimeUnavailable: the worker ended.
            UsageError: this is a fork of the process that started it.
        """
        if os.getpid() != self._owner:  # two that read the same answers would each get half
            raise UsageError(
                "this model was loaded before this process was forked", "load it after the fork"
            )
        with self._lock:
            if not self.close.alive:
                raise RuntimeUnavailable("the Node process has ended", "load the model again")
            try:
                self._write({"do": do, **request}, tensors or {})
                head, answered = self._read()
            except (BrokenPipeError, EOFError):
                raise RuntimeUnavailable(*self._epitaph(do)) from None
            except BaseException:  # Ctrl-C in between leaves an answer that nobody expects
                self.close()
                raise
        if "error" in head:
            raise Refused(head["error"])
        return head, answered

    def logged(self, do: str) -> str:
        """What the worker logs while it does that. Errors are those of `ask`."""
        begun = self._log.seek(0, os.SEEK_END)
        self.ask(do)
        self._log.seek(begun)
        return self._log.read().decode(errors="replace")

    def _write(self, head: dict[str, Any], tensors: Mapping[str, NDArray[np.generic]]) -> None:
        arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        listing = [
            {"name": name, "dtype": array.dtype.name, "shape": tensors[name].shape}
            for name, array in arrays.items()
        ]
        text = json.dumps({**head, "tensors": listing}).encode()
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(struct.pack("<I", len(text)) + text)
        for array in arrays.values():
            stdin.write(_bytes(array))
        stdin.flush()

    def _read(self) -> tuple[dict[str, Any], Arrays]:
        (length,) = struct.unpack("<I", self._fill(memoryview(bytearray(4))))
        head = json.loads(bytes(self._fill(memoryview(bytearray(length)))))
        tensors: Arrays = {}
        for entry in head.pop("tensors"):
            tensors[entry["name"]] = np.empty(entry["shape"], np.dtype(entry["dtype"]))
            self._fill(_bytes(tensors[entry["name"]]))
        return head, tensors

    def _fill(self, buffer: memoryview) -> memoryview:
        done = 0
        while done < len(buffer):
            count = self._answers.readinto(buffer[done:])
            if not count:
                raise EOFError
            done += count
        return buffer

    def _epitaph(self, do: str) -> tuple[str, str]:
        code = self._process.wait()
        self._log.seek(-min(self._log.seek(0, os.SEEK_END), LAST_WORDS), os.SEEK_END)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        told = [line.strip() for line in lines if "Error" in line] or lines
        cause = f"killed by signal {-code}" if code < 0 else told[-1] if told else f"exit {code}"
        self.close()
        return f"the Node process ended during '{do}' ({cause})", "load the model again"


def _bytes(array: NDArray[np.generic]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _end(process: subprocess.Popen[bytes], answers: IO[bytes], log: IO[bytes], owner: int) -> None:
    if os.getpid() == owner:  # a fork of the owner leaves the process alone
        process.kill()
        process.wait()
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # what was not sent yet
            process.stdin.close()
    answers.close()
    log.close()
