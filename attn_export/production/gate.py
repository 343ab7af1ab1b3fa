"""Who may use what a session holds: many threads, until it is closed; no forked child.

A fork copies none of the threads of a pool. A child that runs an inherited session works with what
is left of it, and one that frees it waits for threads that it does not have. So a child refuses to
run, and what it inherited is never freed there.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable

from attn_export.errors import UsageError


class Gate:
    """`with gate:` around each use. Closing lets those inside finish; the last one out releases.

    Nobody waits, so that a signal handler may close a session which its own thread is running.
    """

    def __init__(self, held: object, release: Callable[[], None]) -> None:
        """`held` is what a forked child must not free."""
        self._held, self._release = held, release
        self._lock = threading.RLock()  # a signal handler may close while this thread holds it
        self._inside = 0
        self._closed = False
        self._process = os.getpid()
        _GATES.add(self)

    @property
    def is_open(self) -> bool:
        return not self._closed and self._process == os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                f"this session was opened in process {self._process} and is used in {os.getpid()},"
                " which was forked from it",
                "open one there with session.reopen(), for instance in gunicorn's post_fork",
            )
        with self._lock:
            if self._closed:
                raise UsageError("this session is closed", "load the bundle again")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            last = self._closed and not self._inside
        if last:
            self._release()

    def close(self) -> None:
        """Let nobody in any more; does nothing the second time, and in a forked child."""
        if self._process != os.getpid():
            return
        with self._lock:
            idle = not self._closed and not self._inside
            self._closed = True
        if idle:
            self._release()

    def abandon(self) -> None:
        """Keep what is held for as long as the process lives, past the interpreter's own end."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._held))


_GATES: weakref.WeakSet[Gate] = weakref.WeakSet()


def _abandon_inherited() -> None:
    for gate in list(_GATES):
        gate.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_inherited)
