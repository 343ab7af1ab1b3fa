"""A real Ray Serve on this machine: right answers, refusals, and replicas that die or multiply."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from tritonclient import http as triton

import attn_export
from attn_export.errors import UsageError
from attn_export.serve.ray_serve import Scale
from tests.boundary import SCRIPT, Cli
from tests.predict.test_ray_data import descendants


def command(replicas: str, bundle: Path) -> list[str | Path]:
    return [
        SCRIPT, "serve", "--engine", "ray", "--replicas", replicas, "--ongoing", "1", "--port", "0",
        "--threads", "1", "--max-request-mb", "1", "--json", f"digits={bundle}",
    ]  # fmt: skip


@contextmanager
def served(replicas: str, bundle: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server of `digits`, and its port; ended by SIGTERM, without an error."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(replicas, bundle), text=True, stdout=pipe, stderr=pipe, cwd="/"
    ) as process:
        try:
            assert process.stdout is not None
            told = ""
            while not told.endswith("}\n"):
                line = process.stdout.readline()
                assert line, process.communicate()[1]
                told += line
            yield process, json.loads(told)["port"]
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=60)
            assert process.returncode == 0, stderr
            assert "Traceback" not in stderr
        finally:
            process.kill()


def images(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, 1, 8, 8), np.float32)


def asked(client: triton.InferenceServerClient, image: np.ndarray) -> np.ndarray:
    given = triton.InferInput("image", list(image.shape), "FP32")
    given.set_data_from_numpy(image, binary_data=True)
    return client.infer("digits", [given]).as_numpy("logits")


def replicas_of(process: subprocess.Popen[str]) -> list[int]:
    return [pid for pid, name in descendants(process.pid).items() if "ServeReplica" in name]


def test_ray_serve_answers_as_the_bundle_and_refuses_what_it_does_not_take(
    digits_bundle: Path,
) -> None:
    with (
        served("1", digits_bundle) as (_, port),
        attn_export.load(digits_bundle, threads=1) as session,
    ):
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        assert client.is_server_ready()
        assert client.is_model_ready("digits")
        metadata = client.get_model_metadata("digits")
        assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
        for rows in (1, 3, 2):
            image = images(rows, rows)
            expected = session.run({"image": image})["logits"]
            np.testing.assert_allclose(asked(client, image), expected, atol=1e-5)
        client.close()
        url = f"http://127.0.0.1:{port}/v2/models/digits/infer"
        wrong = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 7], "data": [0.0] * 56}
        bad = {
            b"{": 400,
            json.dumps({"inputs": [wrong]}).encode(): 400,
            b" " * 1_100_000: 413,
        }
        for body, status in bad.items():
            with pytest.raises(HTTPError) as refused:
                urlopen(Request(url, body, {"content-type": "application/json"}), timeout=30)
            assert refused.value.code == status
            assert json.loads(refused.value.read())["error"].endswith(".")


@pytest.mark.slow
def test_a_replica_that_dies_is_replaced_and_the_other_one_answers(digits_bundle: Path) -> None:
    with (
        served("2", digits_bundle) as (process, port),
        attn_export.load(digits_bundle, threads=1) as session,
    ):
        before = replicas_of(process)
        assert len(before) == 2
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        os.kill(before[0], signal.SIGKILL)
        failed = 0
        for index in range(200):
            image = images(1, index)
            try:
                answer = asked(client, image)
            except triton.InferenceServerException:
                failed += 1  # in flight to the replica that died: the client is told
                continue
            expected = session.run({"image": image})["logits"]
            np.testing.assert_allclose(answer, expected, atol=1e-5)
        assert failed <= 5
        limit = time.monotonic() + 60
        while len(after := replicas_of(process)) < 2:
            assert time.monotonic() < limit, "no replica came in place of the one that died"
            time.sleep(0.2)
        assert before[0] not in after
        client.close()


@pytest.mark.slow
def test_replicas_multiply_under_load(digits_bundle: Path) -> None:
    with served("1..2", digits_bundle) as (process, port):
        assert len(replicas_of(process)) == 1
        stop = threading.Event()
        body = json.dumps({"inputs": [
            {"name": "image", "datatype": "FP32", "shape": [64, 1, 8, 8], "data": [0.5] * 4096}
        ]}).encode()  # fmt: skip
        url = f"http://127.0.0.1:{port}/v2/models/digits/infer"
        wrong: list[int] = []

        def ask() -> None:
            while not stop.is_set():
                try:
                    with urlopen(Request(url, body), timeout=60) as answer:
                        count = len(json.loads(answer.read())["outputs"][0]["data"])
                        wrong.extend([count] if count != 640 else [])
                except URLError as error:
                    wrong.append(getattr(error, "code", 0))

        clients = [threading.Thread(target=ask) for _ in range(8)]
        for client in clients:
            client.start()
        try:
            limit = time.monotonic() + 120
            while len(replicas_of(process)) < 2:
                assert time.monotonic() < limit, "no second replica came under load"
                time.sleep(0.2)
        finally:
            stop.set()
            for client in clients:
                client.join()
        assert wrong == []


@pytest.mark.slow
def test_a_bundle_that_fails_its_own_check_is_one_sentence(cli: Cli, wrong_bundle: Path) -> None:
    ended = cli(*command("1", wrong_bundle)[1:])
    assert ended.code == 1
    assert "Error: ort-cpu differs from PyTorch here" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--engine", "ray", "--grpc-port", "0"], "--grpc-port has no use with --engine ray"),
        (["--replicas", "2"], "--replicas has no use with --engine kserve; add --engine ray"),
        (["--engine", "ray", "BUNDLE"], "two models are called 'vit-digits'"),
        (["--engine", "ray", "--replicas", "many"], "--replicas many does not parse"),
    ],
)
def test_what_cannot_be_meant_starts_nothing(
    cli: Cli, digits_bundle: Path, arguments: list[str], sentence: str
) -> None:
    given = [str(digits_bundle) if word == "BUNDLE" else word for word in arguments]
    ended = cli("serve", digits_bundle, *given)
    assert ended.code == 2
    assert ended.sentence.startswith(sentence)


@pytest.mark.parametrize("text", ["0", "x", "3..2", "", "1..", "..2"])
def test_numbers_of_replicas_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--replicas"):
        Scale.parse(text)


def test_numbers_of_replicas() -> None:
    assert Scale.parse("2") == Scale(2, 2)
    assert Scale.parse("1..4", 2.0) == Scale(1, 4, 2.0)
