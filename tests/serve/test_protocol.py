"""What clients see that were written by others: Triton's, over REST and gRPC, and curl."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from google.protobuf.json_format import ParseDict
from tritonclient.grpc.service_pb2 import ModelMetadataResponse

from attn_export import load
from attn_export.production.session import BundleSession
from tests.serve.conftest import Served, http_request, infer, tensors

RNG = np.random.default_rng(3)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def digits(digits_bundle: Path) -> Iterator[BundleSession]:
    with load(digits_bundle, "ort-cpu", threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def masked(masked_bundle: Path) -> Iterator[BundleSession]:
    with load(masked_bundle, "ort-cpu", threads=1) as session:
        yield session


@pytest.fixture(params=["http", "grpc"])
def client(server: Served, request: pytest.FixtureRequest) -> Iterator[Any]:
    with getattr(server, request.param)() as opened:
        yield opened


def curl(*arguments: str, data: bytes = b"") -> tuple[int, str]:
    """Status and body."""
    command = ["curl", "-s", "-w", "\n%{http_code}", *arguments]
    ended = subprocess.run(command, input=data, capture_output=True, check=True)
    body, _, status = ended.stdout.decode().rpartition("\n")
    return int(status), body


def images(rows: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=(rows, 1, 8, 8)).astype(np.float32)


def sentences(length: int, rows: int = 1) -> dict[str, Any]:
    tokens = RNG.normal(size=(rows, length, 16)).astype(np.float32)
    return {"tokens": tokens, "mask": np.arange(length) < np.full((rows, 1), max(1, length - 2))}


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_the_answer_is_that_of_the_session(client: Any, digits: BundleSession, rows: int) -> None:
    image = images(rows)
    answer = infer(client, "vit-digits", {"image": image}, "logits")
    np.testing.assert_allclose(answer, digits.run({"image": image})["logits"], **CLOSE)


@pytest.mark.parametrize(("rows", "length"), [(1, 3), (2, 7), (1, 300)])
def test_several_inputs_of_several_datatypes_and_lengths(
    client: Any, masked: BundleSession, rows: int, length: int
) -> None:
    inputs = sentences(length, rows)
    (name,) = masked.run(inputs)
    answer = infer(client, "masked", inputs, name)
    np.testing.assert_allclose(answer, masked.run(inputs)[name], **CLOSE)


def test_health_and_readiness(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("vit-digits")
    assert client.is_model_ready("masked", "1")


def test_metadata_has_names_datatypes_and_shapes(server: Served) -> None:
    with server.http() as http, server.grpc() as grpc:
        found = http.get_model_metadata("masked")
        assert ParseDict(found, ModelMetadataResponse()) == grpc.get_model_metadata("masked")
        names = http.get_server_metadata()["name"], grpc.get_server_metadata().name
    assert names == ("attn-export", "attn-export")
    assert (found["name"], found["versions"]) == ("masked", ["1"])
    assert found["inputs"] == [
        {"name": "tokens", "datatype": "FP32", "shape": [-1, -1, 16]},
        {"name": "mask", "datatype": "BOOL", "shape": [-1, -1]},
    ]
    assert [output["shape"] for output in found["outputs"]] == [[-1, -1, 16]]


def test_json_numbers_are_taken_flat_and_nested_and_given_back(
    server: Served, digits: BundleSession
) -> None:
    image = images(2)
    expected = digits.run({"image": image})["logits"]
    for data in (image.ravel().tolist(), image.tolist()):
        body = {"id": "mine", "inputs": [
            {"name": "image", "shape": [2, 1, 8, 8], "datatype": "FP32", "data": data}
        ]}  # fmt: skip
        url = f"{server.url}/v2/models/vit-digits/infer"
        status, text = curl(url, "--data-binary", "@-", data=json.dumps(body).encode())
        answer = json.loads(text)
        assert (status, answer["id"], answer["model_name"]) == (200, "mine", "vit-digits")
        (output,) = answer["outputs"]
        assert (output["name"], output["datatype"], output["shape"]) == ("logits", "FP32", [2, 10])
        np.testing.assert_allclose(np.reshape(output["data"], (2, 10)), expected, **CLOSE)


def test_contents_of_grpc_without_raw_bytes(server: Served, digits: BundleSession) -> None:
    image = images(1)
    request = tritonclient.grpc.service_pb2.ModelInferRequest(model_name="vit-digits")
    entry = request.inputs.add(name="image", datatype="FP32", shape=image.shape)
    entry.contents.fp32_contents.extend(image.ravel().tolist())
    with server.grpc() as grpc:
        answer = grpc._client_stub.ModelInfer(request)
    assert not answer.raw_output_contents
    (output,) = answer.outputs
    expected = digits.run({"image": image})["logits"]
    np.testing.assert_allclose([output.contents.fp32_contents], expected, **CLOSE)
    assert answer.id


def test_an_output_may_be_asked_for_by_name(server: Served) -> None:
    with server.http() as http:
        output = tritonclient.http.InferRequestedOutput("logits", binary_data=False)
        answer = http.infer("vit-digits", tensors(http, {"image": images(1)}), outputs=[output])
        assert "data" in answer.get_output("logits")
        assert answer.as_numpy("logits").shape == (1, 10)


def test_a_request_id_is_kept_and_a_wild_one_replaced(server: Served) -> None:
    with server.http() as http:
        for given, kept in (("a-1", True), ("x" * 200, False), ("naïve", False)):
            answer = http.infer(
                "vit-digits", tensors(http, {"image": images(1)}),
                headers={"X-Request-Id": given.encode("latin-1").decode("latin-1")},
            )  # fmt: skip
            assert (answer.get_response()["id"] == given) is kept
    logged = [line["id"] for line in server.log if line["message"] == "request"]
    assert "a-1" in logged
    assert "x" * 200 not in logged


def test_the_answer_carries_the_id_of_the_request(server: Served) -> None:
    body, headers = http_request({"image": images(1)})
    url = f"{server.url}/v2/models/vit-digits/infer"
    given = {**headers, "X-Request-Id": "kept"}
    with urlopen(Request(url, body, given)) as answer:
        assert answer.headers["X-Request-Id"] == "kept"
    with pytest.raises(HTTPError) as seen:
        urlopen(Request(url, b"{", {"X-Request-Id": "refused"}))
    with seen.value as answer:
        assert (answer.code, answer.headers["X-Request-Id"]) == (400, "refused")
    (line,) = [line for line in server.log if line.get("id") == "refused"]
    assert (line["status"], "the body is not JSON" in line["error"]) == (400, True)


def test_a_log_line_tells_what_a_request_cost(server: Served) -> None:
    with server.grpc() as grpc:
        inputs = tensors(grpc, {"image": images(3)})
        grpc.infer("vit-digits", inputs, headers={"x-request-id": "g7"})
    (line,) = [line for line in server.log if line.get("id") == "g7"]
    assert (line["protocol"], line["model"], line["status"]) == ("grpc", "vit-digits", 200)
    assert line["run_rows"] == 3
    assert 0 < line["run_ms"] <= line["ms"]


def test_metrics_count_by_model_protocol_and_status(server: Served) -> None:
    before = server.metric("attn_export_requests_total", protocol="http", status="200")
    with server.http() as http:
        infer(http, "vit-digits", {"image": images(1)}, "logits")
    after = server.metric("attn_export_requests_total", protocol="http", status="200")
    assert after - before == 1
    assert server.metric("attn_export_ready", model_name="masked") == 1
    assert server.metric("request_predict_seconds_count", model_name="vit-digits") > 0  # KServe's


def test_curl_lists_the_models(server: Served) -> None:
    assert curl(f"{server.url}/v2/models") == (200, '{"models":["vit-digits","masked"]}')
    assert curl(f"{server.url}/v2/health/ready") == (200, '{"ready":true}')
    assert curl(f"{server.url}/v2/health/live") == (200, '{"live":true}')


def test_curl_sends_binary(server: Served, digits: BundleSession, tmp_path: Path) -> None:
    image = images(1)
    body, headers = http_request({"image": image})
    ((header, length),) = headers.items()
    status, _ = curl(
        f"{server.url}/v2/models/vit-digits/versions/1/infer", "--data-binary", "@-",
        "-H", f"{header}: {length}", "-o", str(tmp_path / "answer"), data=body,
    )  # fmt: skip
    assert status == 200
    raw = (tmp_path / "answer").read_bytes()[-40:]
    expected = digits.run({"image": image})["logits"]
    np.testing.assert_allclose([np.frombuffer(raw, np.float32)], expected, **CLOSE)
