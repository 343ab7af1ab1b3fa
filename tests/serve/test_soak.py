"""Ten minutes of requests, good and bad, whole and cut off: no growth, no wrong answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from attn_export import load
from tests.serve.conftest import Serve, Served, http_request, infer, tensors

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
BOUND_MB = 16.0
PATH = "/v2/models/vit-digits/infer"


def resident_mb(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def good(served: Served, images: Any, logits: Any, end: threading.Event, number: int) -> int:
    rng, count = np.random.default_rng(number), 0
    with served.http() if number % 2 else served.grpc() as client:
        while not end.is_set():
            first = int(rng.integers(len(images) - 3))
            rows = slice(first, first + int(rng.integers(1, 4)))
            answer = infer(client, "vit-digits", {"image": images[rows]}, "logits")
            np.testing.assert_allclose(answer, logits[rows], rtol=1e-5, atol=1e-5)
            count += 1
    return count


def bad(served: Served, images: Any, end: threading.Event) -> int:
    """Mistakes of every kind, and connections that end in the middle."""
    count, port = 0, served.told["port"]
    body, headers = http_request({"image": images[:1]})
    with served.grpc() as client:
        while not end.is_set():
            for sent in (b"{", body[:-1], body + b"0", b" " * 100_000):
                connection = HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request("POST", PATH, sent, headers)
                answer = connection.getresponse()
                assert (answer.status, bool(answer.read())) == (400, True)
                connection.close()
                count += 1
            with socket.create_connection(("127.0.0.1", port)) as cut:
                cut.sendall(f"POST {PATH} HTTP/1.1\r\nContent-Length: 9999\r\n\r\n{{".encode())
            with pytest.raises(InferenceServerException):
                client.infer("vit-digits", tensors(client, {"image": images[:1, 0]}))
            end.wait(0.02)
    return count


@pytest.mark.slow
def test_ten_minutes_leave_no_memory_behind(serve: Serve, digits_bundle: Path) -> None:
    images = np.random.default_rng(2).normal(size=(32, 1, 8, 8)).astype(np.float32)
    with load(digits_bundle, "ort-cpu", threads=1) as session:
        logits = session.run({"image": images})["logits"]
    served, end, seen = serve(digits_bundle, "--threads", "1", "-q"), threading.Event(), []
    with ThreadPoolExecutor(5) as pool:
        work = [pool.submit(good, served, images, logits, end, number) for number in range(4)]
        work.append(pool.submit(bad, served, images, end))
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and not any(each.done() for each in work):
            time.sleep(SECONDS / 40)
            seen.append(resident_mb(served.process.pid))
        end.set()
        counts = [each.result() for each in work]
    assert min(counts) > 10
    early, late = max(seen[: len(seen) // 4]), min(seen[-5:])
    print(f"{sum(counts)} requests; {early:.1f} MB in the first quarter, {late:.1f} MB at the end")
    assert late - early < BOUND_MB, seen
    assert served.end() == 0
    assert not [line for line in served.log if "exception" in line]
