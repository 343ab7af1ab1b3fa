"""The queue, the time limit, and readiness."""

from __future__ import annotations

import math
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from attn_export.errors import UsageError
from attn_export.reference import Case
from attn_export.serve.settings import Settings
from tests.boundary import SCRIPT, Cli, edit_manifest
from tests.serve.conftest import Array, Serve, Served, free_port, http_request, infer, tensors
from tests.small_bundles import IDENTITY, small_bundle


def slow() -> dict[str, Array]:
    """Takes a few tenths of a second."""
    tokens = np.random.default_rng(5).normal(size=(16, 2048, 16)).astype(np.float32)
    return {"tokens": tokens, "mask": np.ones((16, 2048), bool)}


def quick() -> dict[str, Array]:
    return {"tokens": np.ones((1, 4, 16), np.float32), "mask": np.ones((1, 4), bool)}


def ask(served: Served, inputs: dict[str, Array]) -> tuple[int, str | None, bytes]:
    """Status, Retry-After and body."""
    body, headers = http_request(inputs)
    connection = HTTPConnection("127.0.0.1", served.told["port"], timeout=60)
    connection.request("POST", "/v2/models/masked/infer", body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.getheader("Retry-After"), answer.read()
    connection.close()
    return found


def ask_grpc(served: Served, inputs: dict[str, Array]) -> str:
    with served.grpc() as client:
        try:
            client.infer("masked", tensors(client, inputs))
        except InferenceServerException as error:
            return str(error.status())
    return "OK"


def test_a_full_queue_says_when_to_come_again(serve: Serve, masked_bundle: Path) -> None:
    """One runs and two wait; each of the others is refused at once, and none is lost."""
    served = serve(f"masked={masked_bundle}", "--queue", "2", "--max-batch-size", "1",
                   "--threads", "1")  # fmt: skip
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: ask(served, slow()), range(12)))
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 3
    for status, retry, body in answers:
        assert retry == ("1" if status == 503 else None)
        assert (b"2 requests wait for 'masked', which is all that may" in body) is (status == 503)
    assert served.metric("attn_export_requests_total", status="503") == statuses.count(503)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: ask_grpc(served, slow()), range(8)))
    assert set(found) == {"OK", "StatusCode.UNAVAILABLE"}
    assert ask(served, quick())[0] == 200


def test_what_takes_too_long_is_given_up_and_the_next_is_served(
    serve: Serve, masked_bundle: Path
) -> None:
    """A run that is too long, and a body that never comes."""
    served = serve(f"masked={masked_bundle}", "--timeout", "0.1", "--threads", "1")
    status, _, body = ask(served, slow())
    assert (status, b"there was no answer within 0.1 s" in body) == (504, True)
    assert ask_grpc(served, slow()) == "StatusCode.DEADLINE_EXCEEDED"
    until = time.monotonic() + 20
    while (status := ask(served, quick())[0]) != 200:  # once the runs that were given up end
        assert status == 504
        assert time.monotonic() < until
    connection = HTTPConnection("127.0.0.1", served.told["port"], timeout=30)
    connection.putrequest("POST", "/v2/models/masked/infer")
    connection.putheader("Content-Length", "100")
    connection.endheaders()
    connection.send(b"{")
    assert connection.getresponse().status == 504
    connection.close()


def test_it_lives_before_it_is_ready_and_refuses_until_then(digits_bundle: Path) -> None:
    """The ports answer while the bundle is verified and warmed up."""
    port, seen = free_port(), list[int]()
    process = subprocess.Popen(
        [SCRIPT, "serve", digits_bundle, "--port", str(port), "--grpc-port", "0", "-q"],
        stdout=subprocess.DEVNULL,
    )
    try:
        while not seen or seen[-1] != 200:
            assert process.poll() is None
            try:
                seen.append(urlopen(f"http://127.0.0.1:{port}/v2/health/ready").status)
            except HTTPError as error:
                seen.append(error.code)
                error.close()
                assert urlopen(f"http://127.0.0.1:{port}/v2/health/live").status == 200
            except URLError:
                time.sleep(0.01)
    finally:
        process.terminate()
        assert process.wait(30) == 0
    assert seen[0] == 503
    assert set(seen) == {200, 503}


def test_a_bundle_whose_answers_are_not_pytorchs_is_never_ready(
    cli: Cli, wrong_bundle: Path
) -> None:
    ended = cli("serve", wrong_bundle, "--port", "0", "--grpc-port", "0", "-q")
    assert (ended.code, ended.stdout) == (1, "")
    assert "ort-cpu differs from PyTorch here" in ended.stderr


@pytest.mark.parametrize("bad", [{"queue": 0}, {"timeout": math.nan}, {"max_delay_ms": -1.0},
                                 {"max_batch_size": 0}, {"max_request_mb": 5000.0}])  # fmt: skip
def test_a_setting_that_cannot_be(bad: dict[str, Any]) -> None:
    (value,) = bad.values()
    with pytest.raises(UsageError, match=f"is {value}; see `attn-export serve --help`"):
        Settings(**bad)


def test_what_cannot_be_served_is_one_sentence(cli: Cli, digits_bundle: Path) -> None:
    port = str(free_port())
    for arguments, told in (
        ([digits_bundle, digits_bundle], "two models are called 'vit-digits'"),
        ([digits_bundle, "--port", port, "--grpc-port", port], f"port {port} of 127.0.0.1"),
        ([digits_bundle, "--threads", "0"], "threads is 0"),
    ):
        ports = [] if "--port" in arguments else ["--port", "0", "--grpc-port", "0"]
        ended = cli("serve", *arguments, *ports, "-q")
        assert (ended.code, told in ended.sentence) == (2, True), ended.stderr


def test_a_folder_that_is_no_bundle(cli: Cli, tmp_path: Path) -> None:
    ended = cli("serve", tmp_path / "none")
    assert (ended.code, "none" in ended.sentence) == (5, True)


def test_the_components_of_a_bundle_are_models_of_their_own(serve: Serve, tmp_path: Path) -> None:
    """Both give back what they get; one calls it x, the other is asked by the bundle's new name."""
    rows = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    cases = [Case("case", name, {"x": rows}, {"y": rows}, {}, {"y": {"all": 1e-4}})
             for name in ("encoder", "decoder")]  # fmt: skip
    bundle = small_bundle(tmp_path / "two", IDENTITY, cases=cases)

    def split(manifest: dict[str, Any]) -> None:
        manifest["components"] = ["encoder", "decoder"]
        for key in ("inputs", "outputs", "targets"):
            manifest[key] = [
                {**entry, "component": name}
                for entry in manifest[key]
                for name in manifest["components"]
            ]

    edit_manifest(bundle, split)
    served = serve(bundle, f"other={bundle}", "--threads", "1")
    names = ["small-encoder", "small-decoder", "other-encoder", "other-decoder"]
    assert served.told["models"] == names
    with served.http() as client:
        for name in names:
            assert infer(client, name, {"x": rows}, "y").tolist() == rows.tolist()
