"""Real servers in processes of their own, on free ports.

The protocol files of kserve and of Triton's client do not load in one process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray

from attn_export.build import export
from tests.boundary import SCRIPT

MODEL = '''
import torch
from torch import nn
from attn_export.models.spec import Axis

class Masked(nn.Module):
    """One attention of two heads over tokens (B, S, 16), blind to keys whose mask is false."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, tokens, mask):
        B, S, D = tokens.shape
        q, k, v = self.qkv(tokens).view(B, S, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None, :])
        return tokens + y.transpose(1, 2).reshape(B, S, D)

def build():
    torch.manual_seed(7)
    axes = {0: Axis("batch", 1, 16), 1: Axis("length", 3, 2048)}
    example = {"tokens": torch.randn(2, 5, 16), "mask": torch.ones(2, 5, dtype=torch.bool)}
    return Masked(), example, {"tokens": axes, "mask": axes}
'''
Array = NDArray[np.generic]


@pytest.fixture(scope="session")
def masked_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokens (batch 1 to 16, length 3 to 2048, 16) float32 and mask (batch, length) bool."""
    folder = tmp_path_factory.mktemp("masked")
    (folder / "masked.py").write_text(MODEL)
    return export(f"{folder / 'masked.py'}:build", folder / "bundle").path


class HttpClient(tritonclient.http.InferenceServerClient):
    """Closed by `with`, in the thread that opened it: in another one gevent's hub refuses to."""

    def __del__(self) -> None:
        """Nothing, whichever thread collects it."""


@dataclass
class Served:
    """A server's process. Its log is read as it comes, so that the pipe never fills."""

    process: subprocess.Popen[str]
    told: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None
    ended: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.told['port']}"

    def http(self) -> Any:
        return HttpClient(f"127.0.0.1:{self.told['port']}")

    def grpc(self) -> Any:
        return tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.told['grpc_port']}")

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, summed over the labels that are not given."""
        found = 0.0
        for line in urlopen(f"{self.url}/metrics").read().decode().splitlines():
            described, _, value = line.rpartition(" ")
            wanted = all(f'{key}="{label}"' in described for key, label in labels.items())
            if described.split("{")[0] == name and wanted:
                found += float(value)
        return found

    @property
    def log(self) -> list[dict[str, Any]]:
        """Every line of stderr, each of which must be a JSON object."""
        return [json.loads(line) for line in self.lines]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        self.ended = True
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert self.reader is not None
        self.reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


Serve = Callable[..., Served]


def start(*arguments: str | Path) -> Served:
    """Start a server and wait until it says that it is ready."""
    ports = ["--port", "0", "--grpc-port", "0"]
    process = subprocess.Popen(
        [str(SCRIPT), "serve", *map(str, arguments), *ports, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )  # fmt: skip
    served = Served(process, {})
    assert process.stdout is not None
    assert process.stderr is not None
    served.reader = threading.Thread(target=served.lines.extend, args=(process.stderr,))
    served.reader.start()
    text = ""
    for line in process.stdout:
        text += line
        if line.rstrip() == "}":
            break
    assert text, "".join(served.lines)
    served.told = json.loads(text)
    return served


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers, and ends those that are left."""
    started: list[Served] = []

    def call(*arguments: str | Path) -> Served:
        started.append(start(*arguments))
        return started[-1]

    yield call
    for served in started:
        if not served.ended:
            served.end(signal.SIGKILL)


@pytest.fixture(scope="session")
def server(digits_bundle: Path, masked_bundle: Path) -> Iterator[Served]:
    """Both bundles; tests that it is shared by leave it as it was."""
    served = start(digits_bundle, f"masked={masked_bundle}", "--finite", "--max-request-mb", "2")
    yield served
    assert served.end() == 0, served.lines
    assert not [line for line in served.log if "exception" in line]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def tensors(client: Any, arrays: dict[str, Array]) -> list[Any]:
    """The inputs of a call with Triton's client, in binary."""
    place = client.__module__ if isinstance(client, type) else type(client).__module__
    module = tritonclient.grpc if "grpc" in place else tritonclient.http
    words = {"float32": "FP32", "bool": "BOOL", "float64": "FP64", "int64": "INT64"}
    inputs = []
    for name, array in arrays.items():
        tensor = module.InferInput(name, array.shape, words[array.dtype.name])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def http_request(arrays: dict[str, Array]) -> tuple[bytes, dict[str, str]]:
    """Body and headers, as Triton's client makes them."""
    client = tritonclient.http.InferenceServerClient
    body, length = client.generate_request_body(tensors(client, arrays))
    return body, {"Inference-Header-Content-Length": str(length)}


def infer(client: Any, model: str, arrays: dict[str, Array], output: str) -> Array:
    answer: Array = client.infer(model, tensors(client, arrays)).as_numpy(output)
    return answer
