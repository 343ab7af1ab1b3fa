"""The process that serves: ports, loading behind them, and an end that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from kserve import ModelServer

from attn_export.errors import UsageError, one_line
from attn_export.production.session import BundleSession
from attn_export.serve.model import BundleModel, open_models
from attn_export.serve.rest import application
from attn_export.serve.rpc import RpcServer
from attn_export.serve.service import Service
from attn_export.serve.settings import Settings

log = logging.getLogger("attn_export")
LINGER = 1.0  # seconds for clients with an open connection to learn that it closes
CLOSED = 0.01  # for the loop to close its listeners, before clients are sent away
TURNED_AWAY = 0.25  # for calls that gRPC would cancel if it stopped before they are refused
SPARE = 5.0  # beyond a request's own limit, before what is left is cut off
BACKLOG = 2048


class Server(ModelServer):
    """KServe's server of models, on addresses of its own, with REST routes that keep arrays.

    `stop` and SIGTERM end it: it says "not ready", waits `drain_delay`, takes no new connection,
    answers all that came on open ones, and ends.
    """

    def __init__(
        self,
        models: Sequence[BundleModel],
        settings: Settings,
        host: str,
        port: int,
        grpc_port: int,
    ) -> None:
        """
        Args:
            port, grpc_port: 0 takes a free one; `http_port` and `grpc_port` tell which.

        Raises:
            UsageError: two models have one name.
        """
        super().__init__(http_port=port, grpc_port=grpc_port, enable_latency_logging=False)
        self.http_port: int = port
        self.grpc_port: int = grpc_port
        for model in models:
            if self.registered_models.get_model(model.name) is not None:
                raise UsageError(
                    f"two models are called '{model.name}'", "serve one as NAME=BUNDLE"
                )
            self.register_model(model)
        self.settings, self.host = settings, host
        self.service = Service(self.registered_models, settings)
        self._stopping: asyncio.Event | None = None

    def start(
        self, models: Sequence[BundleModel], ready: Callable[[], None] = lambda: None
    ) -> None:
        """Serve until it is stopped.

        Args:
            models: those that it was made with, in groups of one bundle.
            ready: called once all are.

        Raises:
            UsageError: a port cannot be used.
            AttnExportError: a bundle could not be opened, or its answers are not PyTorch's.
        """
        config = uvicorn.Config(
            application(self.service), log_config=None, access_log=False, lifespan="off",
            server_header=False, backlog=BACKLOG, timeout_keep_alive=75,
            timeout_graceful_shutdown=int(self.settings.timeout + SPARE),
        )  # fmt: skip
        with (
            _listening(self.host, self.http_port) as listener,
            asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
        ):
            self.http_port = listener.getsockname()[1]
            runner.run(self._serve(_Rest(config, self.service), listener, models, ready))

    def stop(self, sig: int | None = None) -> None:
        """Begin to end; a second signal ends it at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
        self.service.draining = True
        if self._stopping is not None:
            self._stopping.set()

    def _told(self, models: Sequence[BundleModel]) -> dict[str, object]:
        return {
            "host": self.host,
            "port": self.http_port,
            "grpc_port": self.grpc_port,
            "models": {model.name: max(model.rows, 1) for model in models},
        }

    async def _serve(
        self,
        rest: _Rest,
        listener: socket.socket,
        models: Sequence[BundleModel],
        ready: Callable[[], None],
    ) -> None:
        loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop, number)
        rpc = RpcServer(self.service, self.host, self.grpc_port)
        self.grpc_port = rpc.port
        for model in models:
            model.start()
        await rpc.start()
        answering = asyncio.create_task(rest.serve(sockets=[listener]))
        stopped = asyncio.create_task(self._stopping.wait())
        loading = asyncio.create_task(asyncio.to_thread(_open, models))
        sessions: list[BundleSession] = []
        try:
            await asyncio.wait({stopped, loading, answering}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                sessions = loading.result()
                log.info("ready", extra={"fields": self._told(models)})
                ready()
                await asyncio.wait({stopped, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.service.draining = True
            if sessions:
                log.info("draining")
                await asyncio.sleep(self.settings.drain_delay)
            rest.should_exit = True
            await answering
            await asyncio.sleep(TURNED_AWAY)
            await rpc.stop(self.settings.timeout + SPARE)
            for model in models:
                await model.close()
            for session in sessions:
                session.close()
            log.info("stopped")


class _Rest(uvicorn.Server):
    """Signals are the process's own affair, and connections that are open are not cut off."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more; answer on open connections, each of which then closes."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        await asyncio.sleep(CLOSED)
        self._service.closing = True
        until = time.monotonic() + LINGER
        while self.server_state.connections and time.monotonic() < until:
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)


def _open(models: Sequence[BundleModel]) -> list[BundleSession]:
    """The bundles' sessions; all or none."""
    sessions: list[BundleSession] = []
    groups: dict[int, list[BundleModel]] = {}
    for model in models:
        groups.setdefault(id(model.bundle), []).append(model)
    try:
        for group in groups.values():
            sessions.append(open_models(group))
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return sessions


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(
            f"port {port} of {host} cannot be used for REST ({one_line(error)})",
            "name another with --port or --host",
        ) from error
