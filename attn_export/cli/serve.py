"""`attn-export serve`"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from attn_export.cli.options import Output, fallback_option, output_options
from attn_export.errors import UsageError

if TYPE_CHECKING:
    from attn_export.serve.settings import Settings


@click.command("serve")
@click.argument("bundles", nargs=-1, required=True, metavar="[NAME=]BUNDLE...")
@click.option("--runtime", default="auto", show_default=True,
              help="What runs them: ort-cpu, ort-cuda, ort-tensorrt or openvino; auto takes the"
              " first that works here, in the order that was measured.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535),
              help="For REST and /metrics; 0 takes a free one.")  # fmt: skip
@click.option("--grpc-port", default=8081, show_default=True, type=click.IntRange(0, 65535),
              help="For gRPC; 0 takes a free one.")  # fmt: skip
@click.option("--threads", type=int, help="Of each operator on the CPU; all cores if left out.")
@click.option("--max-batch-size", default=8, show_default=True,
              help="Most rows that requests share a run for; 1 shares none.")  # fmt: skip
@click.option("--max-delay", default=1.0, show_default=True, metavar="MS",
              help="How long a request waits for others.")  # fmt: skip
@click.option("--queue", default=64, show_default=True,
              help="Requests of one model that may wait; more get 503.")  # fmt: skip
@click.option("--max-request-mb", default=32.0, show_default=True,
              help="Largest request; larger ones get 413.")  # fmt: skip
@click.option("--timeout", default=30.0, show_default=True, metavar="SECONDS",
              help="For one request, from its first byte on; then it gets 504.")  # fmt: skip
@click.option("--drain-delay", default=0.0, show_default=True, metavar="SECONDS",
              help="After SIGTERM, how long it is not ready and still takes requests.")  # fmt: skip
@click.option("--finite", is_flag=True, help="Refuse NaN and infinities in inputs.")
@click.option("--engine", type=click.Choice(["kserve", "ray"]), default="kserve",
              show_default=True, help="ray: replicas on a Ray cluster, REST alone.")  # fmt: skip
@click.option("--replicas", default="1", show_default=True, metavar="N|MIN..MAX",
              help="With Ray: how many, or from how many to how many, as load is.")  # fmt: skip
@click.option("--ongoing", default=4.0, show_default=True,
              help="With Ray: requests that a replica should have at once.")  # fmt: skip
@click.option("--address", metavar="HOST:PORT|auto",
              help="Of a Ray cluster; one is started here if left out.")  # fmt: skip
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False),
              help="Folder for engines that TensorRT builds; the user's if left out.")  # fmt: skip
@fallback_option
@output_options
def command(
    bundles: tuple[str, ...],
    runtime: str,
    host: str,
    port: int,
    grpc_port: int,
    threads: int | None,
    max_batch_size: int,
    max_delay: float,
    queue: int,
    max_request_mb: float,
    timeout: float,
    drain_delay: float,
    finite: bool,
    engine: str,
    replicas: str,
    ongoing: float,
    address: str | None,
    cache: Path | None,
    allow_fallback: bool,
    output: Output,
) -> None:
    """Serve bundles over REST and gRPC (Open Inference Protocol v2), verified and warm first.

    With --engine ray replicas answer on a Ray cluster, over REST alone.

    Ends on SIGTERM once all that it accepted is answered. Logs are JSON lines on stderr; with
    --json stdout gets one object once the server is ready.
    """
    from attn_export import bundle as folders
    from attn_export.extras import require
    from attn_export.serve.settings import Settings

    settings = Settings(
        runtime, threads, max_batch_size, max_delay, queue, max_request_mb, timeout, drain_delay,
        finite, allow_fallback, cache,
    )  # fmt: skip
    named = [_named(given) for given in bundles]
    _require_engine(engine)
    if engine == "ray":
        _on_ray(named, settings, host, port, replicas, ongoing, address, output)
        return
    found = [(name, folders.read(path)) for name, path in named]
    with _alone():
        require("serve")
        from attn_export.serve import logs
        from attn_export.serve.model import models_of
        from attn_export.serve.server import Server

    level = logging.DEBUG if output.verbose else logging.WARNING if output.quiet else logging.INFO
    logs.configure(level)
    models = [model for name, bundle in found for model in models_of(bundle, settings, name)]
    server = Server(models, settings, host, port, grpc_port)

    def ready() -> None:
        names = [model.name for model in models]
        if not output.json:  # stderr is the log's
            output.console.print(
                f"Serving {', '.join(names)} at http://{host}:{server.http_port},"
                f" gRPC at {host}:{server.grpc_port}",
                markup=False,
            )
        output.result(
            {"host": host, "port": server.http_port, "grpc_port": server.grpc_port, "models": names}
        )

    server.start(models, ready)


OF_ONE_ENGINE = {
    "kserve": ("replicas", "ongoing", "address"),
    "ray": ("grpc_port", "drain_delay"),
}


def _require_engine(engine: str) -> None:
    """Raise UsageError where an option is given that this engine has no use for."""
    context = click.get_current_context()
    other = "ray" if engine == "kserve" else "kserve"
    for name in OF_ONE_ENGINE[engine]:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} has no use with --engine {engine}", f"add --engine {other}")


def _on_ray(
    named: list[tuple[str, Path]],
    settings: Settings,
    host: str,
    port: int,
    replicas: str,
    ongoing: float,
    address: str | None,
    output: Output,
) -> None:
    from attn_export import bundle as folders
    from attn_export.serve.ray_serve import Scale, called_by, places, serve

    served = places(named)
    names = [n for name, path in named for n in called_by(folders.read(path), name)]

    def ready(taken: int) -> None:
        if not output.json:
            told = f"Serving {', '.join(names)} at http://{host}:{taken}, on Ray"
            output.console.print(told, markup=False)
        output.result({"host": host, "port": taken, "models": names})

    scale = Scale.parse(replicas, ongoing)
    serve(served, settings, scale, host=host, port=port, address=address, ready=ready)


def _named(given: str) -> tuple[str, Path]:
    """A name and a path; the name is empty where none is given."""
    name, equals, path = given.partition("=")
    if not equals or Path(given).exists():
        return "", Path(given)
    return name, Path(path)


@contextmanager
def _alone() -> Iterator[None]:
    """KServe reads the command line when it is imported, and takes abbreviations.

    gRPC's own log is no JSON; what it has to say of a request is told by this server's.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = arguments
