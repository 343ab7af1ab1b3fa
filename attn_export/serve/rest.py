"""The protocol over REST, as routes of Starlette.

KServe's own route for inference turns bytes into a list of numbers and back, which takes tens of
milliseconds for an image; these keep them as arrays. They also have no route that loads or unloads
a model: nothing that a client sends reaches the file system.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson
from kserve import InferRequest
from prometheus_client import REGISTRY, exposition
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attn_export.serve import rest_body
from attn_export.serve.call import Call
from attn_export.serve.refusals import Encoded, Gone, Refused, TooLarge
from attn_export.serve.service import Service

ID = "x-request-id"
Handler = Callable[[Request], Awaitable[Response]]


def application(service: Service) -> ASGIApp:
    """The ASGI application."""
    routes = Routes(service)
    model = "/v2/models/{name}"
    version = f"{model}/versions/{{version}}"
    app = Starlette(
        routes=[
            Route("/", routes.live),
            Route("/metrics", metrics),
            Route("/v2", routes.metadata),
            Route("/v2/health/live", routes.live),
            Route("/v2/health/ready", routes.ready),
            Route("/v2/models", routes.models),
            *(Route(path, _told(routes.model)) for path in (model, version)),
            *(Route(f"{path}/ready", _told(routes.model_ready)) for path in (model, version)),
            *(Route(f"{path}/infer", routes.infer, methods=["POST"]) for path in (model, version)),
        ],
        exception_handlers={HTTPException: _no_route},
    )
    return _closing(app, service)


class Routes:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def live(self, request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        ready = self._service.ready
        return _json({"ready": ready}, 200 if ready else 503)

    async def metadata(self, request: Request) -> Response:
        return _json(self._service.metadata())

    async def models(self, request: Request) -> Response:
        return _json({"models": [model.name for model in self._service.models]})

    async def model(self, request: Request) -> Response:
        return _json(self._service.model_metadata(*_named(request)))

    async def model_ready(self, request: Request) -> Response:
        name, version = _named(request)
        ready = self._service.model(name, version).ready and not self._service.draining
        return _json({"name": name, "ready": ready}, 200 if ready else 503)

    async def infer(self, request: Request) -> Response:
        name, version = _named(request)
        call = Call.begin("http", name, request.headers.get(ID))
        headers = {ID: call.id}

        async def read() -> InferRequest:
            body = await self._body(request)
            return rest_body.decode(body, request.headers.get(rest_body.LENGTH), name)

        try:
            asked, answer = await self._service.answer(call, version, read)
            body, length = rest_body.encode(answer, asked)
        except Refused as error:
            return _error(error, headers)
        finally:
            call.end()
        if length is None:
            return Response(body, headers=headers, media_type="application/json")
        headers[rest_body.LENGTH] = str(length)
        return Response(body, headers=headers, media_type="application/octet-stream")

    async def _body(self, request: Request) -> bytes:
        """Raise TooLarge as soon as that is known; what follows is dropped as it arrives."""
        limit = self._service.settings.max_request_bytes
        too_large = TooLarge(
            f"the request has more than {limit:,} bytes",
            "split it, or start the server with a higher --max-request-mb",
        )
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Encoded(
                "the body is compressed, which this server does not read", "send it as is"
            )
        given = request.headers.get("content-length", "")
        if given.isdigit() and int(given) > limit:
            raise too_large
        chunks, size = list[bytes](), 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
        except ClientDisconnect:
            raise Gone("the body ended early", "send all of it") from None
        return b"".join(chunks)


async def metrics(request: Request) -> Response:
    """In the format that Prometheus asks for."""
    encoder, media_type = exposition.choose_encoder(request.headers.get("accept", ""))
    return Response(encoder(REGISTRY), media_type=media_type)


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["name"], request.path_params.get("version", "")


def _told(handler: Handler) -> Handler:
    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except Refused as error:
            return _error(error, {})

    return wrapped


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


def _error(error: Refused, headers: dict[str, str]) -> Response:
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return _json({"error": str(error)}, error.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path[:120]} is no route of this server; see GET /v2."
    return _json({"error": told}, error.status_code, dict(error.headers or {}))


def _closing(app: ASGIApp, service: Service) -> ASGIApp:
    """While the server stops, each answer says that its connection closes."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and service.closing:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await app(scope, receive, closing if scope["type"] == "http" else send)

    return wrapped
