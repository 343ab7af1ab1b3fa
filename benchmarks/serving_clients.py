"""Clients of `serving.py`: what they send, how they ask, and the check of each answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http

import attn_export

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
IMAGES = 32


@dataclass
class Bundle:
    """A bundle, images for it, and what the session answers."""

    path: Path
    images: np.ndarray[Any, Any] = field(init=False)
    answers: np.ndarray[Any, Any] = field(init=False)
    output: str = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        with attn_export.load(self.path, "ort-cpu", warmup=True) as session:
            (spec,) = session.inputs()
            sizes = [size for size in spec.shape[1:] if isinstance(size, int)]
            rng = np.random.default_rng(0)
            self.images = rng.normal(size=(IMAGES, *sizes)).astype(np.float32)
            found = [session.run({spec.name: image[None]}) for image in self.images]
            (self.output,), self.name, self.input = found[0], session.name, spec.name
        self.answers = np.stack([each[self.output][0] for each in found])

    def check(self, index: int, answer: np.ndarray[Any, Any]) -> None:
        np.testing.assert_allclose(answer.ravel(), self.answers[index].ravel(), **CLOSE)

    def run(self, session: Any, index: int) -> np.ndarray[Any, Any]:
        return session.run({self.input: self.images[index][None]})[self.output]

    def infer(self, module: Any, client: Any, index: int) -> np.ndarray[Any, Any]:
        return client.infer(self.name, self.tensors(module, index)).as_numpy(self.output)

    def tensors(self, module: Any, index: int) -> list[Any]:
        image = self.images[index % IMAGES][None]
        tensor = module.InferInput(self.input, image.shape, "FP32")
        tensor.set_data_from_numpy(image)
        return [tensor]


def latencies(bundle: Bundle, seconds: float, ask: Callable[[int], Any]) -> list[float]:
    found, until = [], time.perf_counter() + seconds
    index = 0
    while time.perf_counter() < until:
        begun = time.perf_counter()
        answer = ask(index % IMAGES)
        found.append((time.perf_counter() - begun) * 1e3)
        bundle.check(index % IMAGES, answer)
        index += 1
    return found


async def by_http(bundle: Bundle, port: int, number: int, until: float) -> list[float]:
    """A client that costs little: requests are made before, and answers read without parsing."""
    index, found = number % IMAGES, []
    client = tritonclient.http.InferenceServerClient
    body, length = client.generate_request_body(bundle.tensors(tritonclient.http, index))
    head = (
        f"POST /v2/models/{bundle.name}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {length}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    size = bundle.answers[index].nbytes
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    while time.perf_counter() < until:
        begun = time.perf_counter()
        writer.write(head.encode() + body)
        told = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert told.startswith(b"http/1.1 200"), told
        raw = await _body(reader, told)
        found.append((time.perf_counter() - begun) * 1e3)
        bundle.check(index, np.frombuffer(raw[-size:], np.float32))
    writer.close()
    return found


async def _body(reader: asyncio.StreamReader, told: bytes) -> bytes:
    """Of a known length, or in chunks."""
    if b"\ncontent-length: " in told:
        return await reader.readexactly(int(told.partition(b"\ncontent-length: ")[2].split()[0]))
    raw = b""
    while size := int(await reader.readline(), 16):
        raw += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return raw


async def by_grpc(bundle: Bundle, port: int, number: int, until: float) -> list[float]:
    index, found = number % IMAGES, []
    inputs = bundle.tensors(tritonclient.grpc, index)
    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
        while time.perf_counter() < until:
            begun = time.perf_counter()
            answer = await client.infer(bundle.name, inputs)
            found.append((time.perf_counter() - begun) * 1e3)
            bundle.check(index, answer.as_numpy(bundle.output))
    return found


def at_once(
    way: Callable[..., Any], bundle: Bundle, port: int, clients: int, seconds: float
) -> list[float]:
    """Milliseconds of each request of all clients."""

    async def main() -> list[float]:
        until = time.perf_counter() + seconds
        found = await asyncio.gather(*(way(bundle, port, n, until) for n in range(clients)))
        return [each for times in found for each in times]

    return asyncio.run(main())
