"""SIGTERM under load: what was accepted is answered, and the answer is right."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from attn_export import load
from tests.serve.conftest import Serve, Served, http_request, infer

ROWS = np.random.default_rng(11).normal(size=(64, 1, 8, 8)).astype(np.float32)
CLIENTS = 4


class OneConnection(HTTPConnection):
    """One that is closed stays closed: a new one in its place would hide a lost request."""

    auto_open = 0


class Load:
    """Clients that ask until they are told that the server takes no more."""

    def __init__(self, served: Served, logits: Any) -> None:
        self.served, self.logits = served, logits
        self.answered = 0
        self.lock = threading.Lock()

    def check(self, index: int, logits: Any) -> None:
        np.testing.assert_allclose(logits, self.logits[[index]], rtol=1e-5, atol=1e-5)
        with self.lock:
            self.answered += 1

    def by_connection(self, number: int) -> str:
        """One connection until it is closed; a request on it without an answer is a loss."""
        connection = OneConnection("127.0.0.1", self.served.told["port"], timeout=30)
        connection.connect()
        for index in range(10**6):
            row = (number * 7 + index) % len(ROWS)
            body, headers = http_request({"image": ROWS[[row]]})
            connection.request("POST", "/v2/models/vit-digits/infer", body, headers)
            answer = connection.getresponse()
            raw = answer.read()
            assert answer.status == 200, raw
            self.check(row, np.frombuffer(raw[-40:], np.float32)[None])
            if answer.getheader("Connection") == "close":
                break
        with pytest.raises(ConnectionRefusedError):
            connection.connect()
        return "refused"

    def by_triton_http(self, number: int) -> str:
        with self.served.http() as client:
            return self._until(client, number, (ConnectionRefusedError,))

    def by_triton_grpc(self, number: int) -> str:
        with self.served.grpc() as client:
            return self._until(client, number, (InferenceServerException,))

    def _until(self, client: Any, number: int, end: tuple[type[Exception], ...]) -> str:
        for index in range(10**6):
            row = (number * 7 + index) % len(ROWS)
            try:
                found = infer(client, "vit-digits", {"image": ROWS[[row]]}, "logits")
            except end as error:
                return str(error)
            self.check(row, found)
        raise AssertionError("it never ended")


def test_no_accepted_request_is_lost_on_sigterm(serve: Serve, digits_bundle: Path) -> None:
    served = serve(digits_bundle, "--threads", "1", "--drain-delay", "0.3")
    with load(digits_bundle, "ort-cpu", threads=1) as session:
        clients = Load(served, session.run({"image": ROWS})["logits"])
    ways: list[Callable[[int], str]] = [
        clients.by_connection, clients.by_triton_http, clients.by_triton_grpc
    ]  # fmt: skip
    with ThreadPoolExecutor(CLIENTS * len(ways)) as pool:
        ends = [pool.submit(way, number) for way in ways for number in range(CLIENTS)]
        while clients.answered < 200:
            time.sleep(0.01)
            assert not [end for end in ends if end.done()]
        before = clients.answered
        assert served.end(signal.SIGTERM) == 0
        told = [end.result(30) for end in ends]
    assert clients.answered > before  # it took requests for a while yet
    assert told[:CLIENTS] == ["refused"] * CLIENTS
    for sentence in told[2 * CLIENTS :]:
        assert "UNAVAILABLE" in sentence, sentence
    requests = [line for line in served.log if line["message"] == "request"]
    answered = [line for line in requests if line["status"] == 200]
    assert len(answered) == clients.answered  # each that it answered was received
    refused = [line for line in requests if line["status"] != 200]
    assert {(line["status"], line["protocol"]) for line in refused} <= {(503, "grpc")}
    assert served.log[-1]["message"] == "stopped"


def test_it_is_not_ready_while_it_drains(serve: Serve, digits_bundle: Path) -> None:
    served = serve(digits_bundle, "--drain-delay", "1")
    with served.http() as http, served.grpc() as grpc:
        served.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 0.9
        while http.is_server_ready():
            assert time.monotonic() < until
        assert http.is_server_live()
        assert not grpc.is_server_ready()
        assert not http.is_model_ready("vit-digits")
        image = {"image": ROWS[:1]}
        assert infer(http, "vit-digits", image, "logits").shape == (1, 10)
        assert served.process.wait(30) == 0
        with pytest.raises((ConnectionRefusedError, RemoteDisconnected)):
            http.is_server_live()
    served.end()


def test_an_interrupt_ends_it_too(serve: Serve, digits_bundle: Path) -> None:
    assert serve(digits_bundle).end(signal.SIGINT) == 0
