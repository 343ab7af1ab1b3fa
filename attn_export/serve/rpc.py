"""The protocol over gRPC, with KServe's own protocol file."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc
from kserve import InferRequest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from attn_export.errors import UsageError
from attn_export.serve import rpc_messages
from attn_export.serve.call import Call
from attn_export.serve.refusals import NotReady, Refused
from attn_export.serve.service import Service

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
ID, RETRY = "x-request-id", "retry-after"
LARGEST_ANSWER = 2**31 - 1
OVERHEAD = 65_536  # of a message around its tensors


class Servicer(GRPCInferenceServiceServicer):
    """Loading and unloading stay unimplemented: no request reaches the file system."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerReadyResponse(ready=self._service.ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerMetadataResponse(**self._service.metadata())

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            model = self._service.model(request.name, request.version)
        except Refused as error:
            await _abort(context, error)
        return pb.ModelReadyResponse(ready=model.ready and not self._service.draining)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            found = self._service.model_metadata(request.name, request.version)
        except Refused as error:
            await _abort(context, error)
        return pb.ModelMetadataResponse(**found)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        given = dict(context.invocation_metadata() or ()).get(ID)
        call = Call.begin("grpc", request.model_name, given if isinstance(given, str) else None)

        async def read() -> InferRequest:
            if self._service.closing:
                raise NotReady("the server stops", "send it to another one")
            return rpc_messages.decode(request)

        try:
            _, answer = await self._service.answer(call, request.model_version, read)
            context.set_trailing_metadata(((ID, call.id),))
            return rpc_messages.encode(answer, request)
        except Refused as error:
            await _abort(context, error, (ID, call.id))
        finally:
            call.end()


class RpcServer:
    """A gRPC server in the event loop that REST uses too."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        """Bind the port; 0 takes a free one.

        Raises:
            UsageError: it cannot be bound.
        """
        limit = service.settings.max_request_bytes + OVERHEAD
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", LARGEST_ANSWER),
                ("grpc.so_reuseport", 0),  # another server's port is an error, not shared
            ]
        )
        add_GRPCInferenceServiceServicer_to_server(Servicer(service), self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise UsageError(
                f"port {port} of {host} cannot be used for gRPC", "name another with --grpc-port"
            ) from error

    def start(self) -> Awaitable[None]:
        started: Awaitable[None] = self._server.start()
        return started

    def stop(self, grace: float) -> Awaitable[None]:
        """Take no more calls, and end once those that run are answered."""
        stopped: Awaitable[None] = self._server.stop(grace)
        return stopped


async def _abort(context: Any, error: Refused, *metadata: tuple[str, str]) -> None:
    told = list(metadata)
    if error.retry_after is not None:
        told.append((RETRY, str(error.retry_after)))
    code = CODES.get(error.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, str(error), tuple(told))
