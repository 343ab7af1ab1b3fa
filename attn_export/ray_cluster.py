"""A connection to Ray: to a cluster that runs, or to one that is started here while it is used."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attn_export.errors import RuntimeUnavailable, one_line

HOW_TO_START = "start a cluster with `ray start --head` and give --address auto"
CONNECTING = 5.0  # seconds


@contextmanager
def cluster(address: str | None, cpus: int) -> Iterator[None]:
    """Closed at the end; a connection that the caller has already is left open.

    Args:
        address: of a cluster ("auto" finds the one of this machine); None starts one here.
        cpus: of one that is started here.

    Raises:
        RuntimeUnavailable: no cluster answers, or none starts.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it warns of what Ray Data does itself
    import ray

    if ray.is_initialized():
        yield
        return
    _require_listener(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"num_cpus": cpus, "include_dashboard": False}
    try:
        with _native_notices_hidden():
            ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        raise RuntimeUnavailable(
            f"Ray does not {'start' if address is None else f'answer at {address}'}"
            f" ({one_line(error)})",
            HOW_TO_START,
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _native_notices_hidden() -> Iterator[None]:
    """Ray's C++ part tells its log level on the process's stderr; errors come as exceptions."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _require_listener(address: str | None) -> None:
    """Ray itself tries for minutes where nobody listens."""
    host, _, port = (address or "").rpartition("/")[2].rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=CONNECTING).close()
        except OSError as error:
            raise RuntimeUnavailable(
                f"Ray does not answer at {address} ({one_line(error)})", HOW_TO_START
            ) from error
