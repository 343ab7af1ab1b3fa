"""Each mistake of a client is a 4xx with a sentence, and the server answers the next one."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from attn_export import load
from tests.serve.conftest import Served, infer, tensors

IMAGE = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)
INFER = "/v2/models/vit-digits/infer"


@pytest.fixture(scope="module")
def expected(digits_bundle: Path) -> Any:
    with load(digits_bundle, "ort-cpu", threads=1) as session:
        return session.run({"image": IMAGE})["logits"]


@pytest.fixture(autouse=True)
def _still_well(server: Served, expected: Any) -> Iterator[None]:
    """After each test others get the right answer, over both protocols."""
    yield
    for client in (server.http(), server.grpc()):
        with client:
            answer = infer(client, "vit-digits", {"image": IMAGE}, "logits")
            np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-5)


def post(
    server: Served, body: bytes, path: str = INFER, **headers: str
) -> tuple[int, dict[str, Any]]:
    """Status and the JSON of the answer."""
    connection = HTTPConnection("127.0.0.1", server.told["port"], timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, body, named)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text)


def entry(**changes: Any) -> dict[str, Any]:
    found = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}
    return {key: value for key, value in (found | changes).items() if value is not ...}


def body(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **fields}).encode()


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"\xff\xfe\x00", "the body is not JSON"),
        (b"[" * 5000, "the body is not JSON"),
        (b"[]", "the body is no JSON object"),
        (b"{}", "'inputs' is no list of objects with names"),
        (b'{"inputs": []}', "'inputs' is no list of objects with names"),
        (b'{"inputs": [3]}', "'inputs' is no list of objects with names"),
        (body(entry(name=4)), "'inputs' is no list of objects with names"),
        (body(entry(), entry()), "'inputs' has a name more than once"),
        (body(entry(name="other")), "the model has no input 'other'; its inputs are image."),
        (body(entry(datatype="FP99")), "the datatype of input 'image' is 'FP99'"),
        (body(entry(datatype=...)), "the datatype of input 'image' is None"),
        (body(entry(datatype="FP64")), "input 'image' is float64, the model takes float32"),
        (body(entry(datatype="INT64", data=[1] * 64)), "input 'image' is int64, the model takes"),
        (body(entry(shape=[1, 8, 8])), "input 'image' has shape (1, 8, 8), the model takes"),
        (body(entry(shape=[1, 1, 4, 16])), "input 'image' has 4 on axis 2, the model takes"),
        (body(entry(shape=[0, 1, 8, 8], data=[])), "'batch' is 0 in input 'image'"),
        (body(entry(shape=[2, 1, 8, 8])), "input 'image' has 64 numbers in (64,), its shape is"),
        (body(entry(shape=[1, 1, 8, -8])), "the shape of input 'image' is [1, 1, 8, -8]"),
        (body(entry(shape="1188")), "the shape of input 'image' is '1188'"),
        (body(entry(shape=[1.0, 1, 8, 8])), "the shape of input 'image' is [1.0, 1, 8, 8]"),
        (body(entry(shape=[True, 1, 8, 8])), "the shape of input 'image' is [True, 1, 8, 8]"),
        (body(entry(shape=[2**62, 2**62, 8, 8])), "input 'image' has 64 numbers in (64,)"),
        (body(entry(data=...)), "input 'image' has no data"),
        (body(entry(data=0.5)), "the data of input 'image' is 0.5"),
        (body(entry(data=["0.5"] * 64)), "the data of input 'image' is not all FP32"),
        (body(entry(data=[None] * 64)), "the data of input 'image' is not all FP32"),
        (body(entry(data=[[0.5], [0.5, 1]])), "the data of input 'image' is not all FP32"),
        (body(entry(data=[1e300] * 64)), "a number of input 'image' does not fit FP32"),
        (body(entry()).replace(b"0.5", b"NaN", 1), "the body is not JSON"),
        (body(entry(), id=7), "'id' is no text"),
        (body(entry(), parameters=3), "'parameters' is no object"),
        (body(entry(), outputs=[{"name": "other"}]), "the model has no output 'other'"),
        (
            body(entry(), outputs=[{"name": "logits", "parameters": {"classification": 3}}]),
            "labels of output 'logits' are asked for",
        ),
        (
            body(entry(data=..., parameters={"shared_memory_region": "/etc/passwd"})),
            "input 'image' is said to lie in shared memory",
        ),
    ],
)  # fmt: skip
def test_json_that_the_model_does_not_take(server: Served, sent: bytes, told: str) -> None:
    status, answer = post(server, sent)
    assert status == 400
    assert told in answer["error"]
    assert answer["error"].endswith(".")
    assert "/" not in answer["error"].replace("FP", "")  # no path of the server


@pytest.mark.parametrize(
    ("datatype", "data", "told"),
    [
        ("UINT8", [256] * 64, "a number of input 'image' does not fit UINT8"),
        ("INT64", [1.5] * 64, "the data of input 'image' is not all INT64"),
        ("INT64", [2**63] * 64, "a number of input 'image' does not fit INT64"),
        ("INT64", [2**70] * 64, "the data of input 'image' is not all INT64"),
        ("BOOL", [1] * 64, "the data of input 'image' is not all BOOL"),
        ("FP32", [True] * 64, "the data of input 'image' is not all FP32"),
    ],
)
def test_numbers_that_the_datatype_does_not_have(
    server: Served, datatype: str, data: list[Any], told: str
) -> None:
    status, answer = post(server, body(entry(datatype=datatype, data=data)))
    assert (status, told in answer["error"]) == (400, True), answer


def binary(size: Any, raw: bytes) -> tuple[bytes, str]:
    head = body(entry(data=..., parameters={"binary_data_size": size}))
    return head + raw, str(len(head))


@pytest.mark.parametrize(
    ("size", "raw", "told"),
    [
        (256, b"\0" * 255, "input 'image' is said to have 256 bytes, and 255 are left"),
        (252, b"\0" * 252, "input 'image' has 252 bytes, FP32 (1, 1, 8, 8) takes 256"),
        (256, b"\0" * 260, "4 bytes follow that belong to no input"),
        (-1, b"\0" * 256, "input 'image' is said to have -1 bytes"),
        ("256", b"\0" * 256, "input 'image' is said to have 256 bytes"),
        (10**30, b"\0" * 256, "input 'image' is said to have 1e+30 bytes"),
    ],
)
def test_binary_that_is_cut_off_or_too_long(
    server: Served, size: Any, raw: bytes, told: str
) -> None:
    sent, length = binary(size, raw)
    status, answer = post(server, sent, Inference_Header_Content_Length=length)
    assert (status, told in answer["error"]) == (400, True), answer


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "99999999", "9" * 5000, "٣"])
def test_a_header_length_that_cannot_be(server: Served, length: str) -> None:
    sent, _ = binary(256, b"\0" * 256)
    given = length.encode().decode("latin-1")
    status, answer = post(server, sent, Inference_Header_Content_Length=given)
    assert (status, "Inference-Header-Content-Length is" in answer["error"]) == (400, True)


def test_bytes_of_a_bool_other_than_0_and_1(server: Served) -> None:
    tokens = {"name": "tokens", "shape": [1, 3, 16], "datatype": "FP32", "data": [0.0] * 48}
    size = {"binary_data_size": 3}
    mask = {"name": "mask", "shape": [1, 3], "datatype": "BOOL", "parameters": size}
    head = body(tokens, mask)
    given = {"Inference_Header_Content_Length": str(len(head))}
    path = "/v2/models/masked/infer"
    assert post(server, head + b"\1\1\0", path, **given)[0] == 200
    status, answer = post(server, head + b"\1\2\0", path, **given)
    assert (status, answer["error"][:30]) == (400, "a byte of input 'mask' is neit")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_declared_finite_is_refused_where_it_is_not(
    server: Served, protocol: str, number: float
) -> None:
    image = IMAGE.copy()
    image[0, 0, 3, 3] = number
    with (
        getattr(server, protocol)() as client,
        pytest.raises(InferenceServerException, match="input 'image' is not finite") as seen,
    ):
        infer(client, "vit-digits", {"image": image}, "logits")
    assert "400" in seen.value.status() or "INVALID_ARGUMENT" in seen.value.status()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"image": IMAGE.astype(np.float64)}, "input 'image' is float64, the model takes float32"),
        ({"image": IMAGE[0]}, "input 'image' has shape (1, 8, 8), the model takes"),
        ({"picture": IMAGE}, "the model has no input 'picture'"),
        ({"image": IMAGE, "more": IMAGE}, "the model has no input 'more'"),
        ({"image": IMAGE[:0]}, "'batch' is 0 in input 'image'"),
    ],
)
def test_tensors_that_the_model_does_not_take(
    server: Served, protocol: str, arrays: dict[str, Any], told: str
) -> None:
    with getattr(server, protocol)() as client, pytest.raises(InferenceServerException) as seen:
        client.infer("vit-digits", tensors(client, arrays))
    assert told in seen.value.message()
    assert "400" in seen.value.status() or "INVALID_ARGUMENT" in seen.value.status()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("length", [2, 2049])
def test_a_length_out_of_range(server: Served, protocol: str, length: int) -> None:
    inputs = {
        "tokens": np.zeros((1, length, 16), np.float32),
        "mask": np.ones((1, length), bool),
    }
    with (
        getattr(server, protocol)() as client,
        pytest.raises(InferenceServerException, match=f"'length' is {length} in input"),
    ):
        client.infer("masked", tensors(client, inputs))


def test_inputs_of_different_lengths(server: Served) -> None:
    inputs = {"tokens": np.zeros((1, 5, 16), np.float32), "mask": np.ones((1, 6), bool)}
    with (
        server.grpc() as client,
        pytest.raises(InferenceServerException, match="'length' is 5 in input 'tokens' and 6"),
    ):
        client.infer("masked", tensors(client, inputs))


@pytest.mark.parametrize(
    "name", ["other", "..", "../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "vit-digits%00"]
)
def test_a_model_that_is_not_there(server: Served, name: str) -> None:
    for path in (f"/v2/models/{name}/infer", f"/v2/repository/models/{name}/load"):
        status, answer = post(server, body(entry()), path)
        assert (status, answer["error"].endswith(".")) == (404, True)
    with server.grpc() as client:
        with pytest.raises(InferenceServerException, match="there is no model") as seen:
            client.infer(name, tensors(client, {"image": IMAGE}))
        assert seen.value.status() == "StatusCode.NOT_FOUND"


def test_a_version_that_is_not_there(server: Served) -> None:
    for client in (server.http(), server.grpc()):
        with client, pytest.raises(InferenceServerException, match="has no version '2'"):
            client.infer("vit-digits", tensors(client, {"image": IMAGE}), model_version="2")


def test_no_client_unloads_a_model(server: Served) -> None:
    with (
        server.http() as client,
        pytest.raises(InferenceServerException, match="no route of this server"),
    ):
        client.unload_model("vit-digits")
    with (
        server.grpc() as client,
        pytest.raises(InferenceServerException, match="not implemented"),
    ):
        client.unload_model("vit-digits")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(server: Served, chunked: bool) -> None:
    """2 MB is the limit here; the client may send all of a longer one before it reads."""
    sent = iter([b" " * 100_000] * 30) if chunked else b" " * 3_000_000
    connection = HTTPConnection("127.0.0.1", server.told["port"], timeout=30)
    connection.request("POST", INFER, sent, encode_chunked=chunked,
                       headers={"Transfer-Encoding": "chunked"} if chunked else {})  # fmt: skip
    answer = connection.getresponse()
    assert (answer.status, b"more than 2,000,000 bytes" in answer.read()) == (413, True)
    connection.request("GET", "/v2/health/live")  # the connection lives
    assert connection.getresponse().status == 200
    connection.close()


def test_a_message_over_the_limit(server: Served) -> None:
    image = np.zeros((10_000, 1, 8, 8), np.float32)
    with server.grpc() as client, pytest.raises(InferenceServerException) as seen:
        infer(client, "vit-digits", {"image": image}, "logits")
    assert seen.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_a_compressed_body(server: Served) -> None:
    with (
        server.http() as client,
        pytest.raises(InferenceServerException, match="the body is compressed") as seen,
    ):
        client.infer("vit-digits", tensors(client, {"image": IMAGE}),
                     request_compression_algorithm="gzip")  # fmt: skip
    assert seen.value.status() == "415"


@pytest.mark.parametrize(
    "sent",
    [
        b"\0\1\2\3 nothing\r\n\r\n",
        b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["no HTTP", "cut off", "negative length", "long path"],
)
def test_a_connection_that_ends_in_the_middle(server: Served, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.told["port"]), timeout=10) as connection:
        connection.sendall(sent)


def test_grpc_messages_that_contradict_themselves(server: Served) -> None:
    def request(**fields: Any) -> Any:
        return tritonclient.grpc.service_pb2.ModelInferRequest(model_name="vit-digits", **fields)

    kind = tritonclient.grpc.service_pb2.ModelInferRequest.InferInputTensor
    image = kind(name="image", datatype="FP32", shape=[1, 1, 8, 8])
    raw = IMAGE.tobytes()
    twice = kind(name="image", datatype="FP32", shape=[1, 1, 8, 8])
    twice.contents.fp32_contents.extend([0.0] * 64)
    wrong = kind(name="image", datatype="FP32", shape=[1, 1, 8, 8])
    wrong.contents.int_contents.extend([0] * 64)
    half = kind(name="image", datatype="FP16", shape=[1, 1, 8, 8])
    minus = kind(name="image", datatype="FP32", shape=[-1, 1, 8, 8])
    with server.grpc() as client:
        for sent, told in (
            (request(inputs=[image], raw_input_contents=[raw, raw]), "1 inputs and 2 raw contents"),
            (request(inputs=[image], raw_input_contents=[raw[:-1]]), "has 255 bytes"),
            (request(inputs=[image, image], raw_input_contents=[raw, raw]), "more than once"),
            (request(inputs=[twice], raw_input_contents=[raw]), "contents and raw contents"),
            (request(inputs=[wrong]), "has 0 numbers"),
            (request(inputs=[half]), "which has no contents"),
            (request(inputs=[minus], raw_input_contents=[raw]), "the shape of input 'image'"),
            (request(), "input 'image' is missing"),
        ):
            with pytest.raises(Exception, match=told) as seen:
                client._client_stub.ModelInfer(sent)
            assert "INVALID_ARGUMENT" in str(seen.value)
