"""Bundles on Ray Serve: replicas that Ray starts, watches and scales, behind one address.

A replica answers with the same routes, checks and shared runs as `attn-export serve` does; Ray's
proxy hands requests to the replica that has the fewest. A replica opens its bundles, compares them
with PyTorch's stored answers and warms up before Ray gives it a request. REST alone: Ray Serve
takes gRPC by code that is generated for a service.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.errors import (
    AttnExportError,
    CheckFailed,
    FileError,
    RuntimeUnavailable,
    UsageError,
    one_line,
)
from attn_export.extras import require
from attn_export.production.rows import model_name
from attn_export.ray_cluster import cluster
from attn_export.runtimes.threads import cores
from attn_export.serve.ray_replica import Place, Replica
from attn_export.serve.settings import Settings

APPLICATION = "attn-export"
SPARE = 5.0  # seconds beyond a request's own limit, before a replica that ends is cut off
WAITING = 4  # requests that a proxy holds for each one that a replica may have


@dataclass(frozen=True)
class Scale:
    """How many replicas.

    Attributes:
        ongoing: requests a replica should have; Ray adds replicas where they have more, and takes
            some away where they have fewer.

    Raises:
        UsageError: fewer than one, or the most below the fewest.
    """

    fewest: int = 1
    most: int = 1
    ongoing: float = 4.0

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            raise UsageError(
                f"--replicas is {self.fewest}..{self.most}", "give MIN..MAX with 1 <= MIN <= MAX"
            )
        if self.ongoing <= 0:
            raise UsageError(f"--ongoing is {self.ongoing}", "give more than 0")

    @classmethod
    def parse(cls, text: str, ongoing: float = 4.0) -> Scale:
        """`N` or `MIN..MAX`."""
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
        if found is None:
            raise UsageError(f"--replicas {text} does not parse", "write 2 or 1..4")
        return cls(int(found[1]), int(found[2] or found[1]), ongoing)


def places(named: Sequence[tuple[str, Path]]) -> list[Place]:
    """Bundles that were read and found whole.

    Args:
        named: a name (or nothing) and a path each.

    Raises:
        FileError: a bundle is bad.
        UsageError: two models have one name.
    """
    found, names = [], set[str]()
    for name, path in named:
        bundle = bundles.read(path)
        for called in called_by(bundle, name):
            if called in names:
                raise UsageError(f"two models are called '{called}'", "serve one as NAME=BUNDLE")
            names.add(called)
        found.append(Place(name, path.absolute(), bundle.digest()))
    return found


def called_by(bundle: bundles.Bundle, name: str) -> list[str]:
    """What clients call the models of a bundle that is served under this name, or its own."""
    several = len(bundle.components) > 1
    return [
        (f"{name}-{component}" if several else name) if name else model_name(bundle, component)
        for component in bundle.components
    ]


def serve(
    served: Sequence[Place],
    settings: Settings,
    scale: Scale,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    address: str | None = None,
    ready: Callable[[int], None] = lambda port: None,
) -> None:
    """Deploy bundles and stay until SIGTERM or Ctrl-C; then the replicas end.

    Args:
        settings: all but `drain_delay`, which Ray has no use for.
        port: 0 takes a free one, which `ready` is told.
        address: of a cluster, as `attn_export.ray_cluster` takes it; None starts one here.

    Raises:
        RuntimeUnavailable: Ray is not installed or not there, or no runtime works on its nodes.
        UsageError: the port is taken.
        CheckFailed, FileError: a replica found another bundle, or other answers than PyTorch's.
    """
    require("ray")
    require("serve")
    taken = port or _free_port(host)
    stop = threading.Event()
    with cluster(address, max(cores(), scale.most * (settings.threads or 1))):
        ray_serve = _api()
        try:
            deploy(served, settings, scale, host=host, port=taken)
            handlers = {
                number: signal.signal(number, lambda *_: stop.set())
                for number in (signal.SIGINT, signal.SIGTERM)
            }
            try:
                ready(taken)
                while not stop.wait(0.5):
                    pass
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        finally:
            ray_serve.shutdown()


def deploy(
    served: Sequence[Place], settings: Settings, scale: Scale, *, host: str, port: int
) -> None:
    """Deploy on the cluster that is connected, and return once every replica is ready.

    Errors are those of `serve`.
    """
    _require_port(host, port)
    from ray.serve.config import AutoscalingConfig, HTTPOptions

    ray_serve = _api()

    ray_serve.start(
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host=host, port=port, request_timeout_s=settings.timeout + SPARE),
    )
    fixed = scale.fewest == scale.most
    automatic = AutoscalingConfig(
        min_replicas=scale.fewest, max_replicas=scale.most, target_ongoing_requests=scale.ongoing
    )
    deployment = ray_serve.deployment(
        ray_serve.ingress()(Replica),
        name=APPLICATION,
        num_replicas=scale.fewest if fixed else "auto",
        autoscaling_config=None if fixed else automatic,
        max_ongoing_requests=settings.queue,
        max_queued_requests=settings.queue * WAITING,
        graceful_shutdown_timeout_s=settings.timeout + SPARE,
        ray_actor_options={"num_cpus": settings.threads or 1},
    )
    try:
        ray_serve.run(deployment.bind(list(served), settings), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise _told(_report()) from error


def _api() -> Any:
    """Ray Serve, part of whose functions have no annotations; what it does is told by ours."""
    from ray import serve as ray_serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return ray_serve


def _report() -> str:
    """What Ray has to say of the replicas that did not start."""
    application = _api().status().applications[APPLICATION]
    return "\n".join(
        [application.message, *(each.message for each in application.deployments.values())]
    )


def _told(report: str) -> AttnExportError:
    """The sentence of a replica that did not open its bundles, out of Ray's report of it."""
    kinds = (CheckFailed, FileError, RuntimeUnavailable, UsageError)
    for line in reversed(report.splitlines()):
        for kind in kinds:
            _, found, sentence = line.partition(f"{kind.__name__}: ")
            if found and "; " in sentence:
                observed, _, way_out = sentence.strip().rstrip(".").partition("; ")
                return kind(observed, way_out)
    last = report.strip().splitlines()[-1:] or ["no report"]
    return RuntimeUnavailable(
        f"Ray Serve did not start it ({last[0].strip()[:300]})", "look at Ray's own logs"
    )


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _require_port(host: str, port: int) -> None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UsageError(
            f"port {port} of {host} cannot be used ({one_line(error)})", "name another with --port"
        ) from error
