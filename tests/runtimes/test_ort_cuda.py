"""What CUDA is told; whether it listens is seen on a GPU alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attn_export.doctor.probe import cases, graph
from attn_export.runtimes import libraries, ort_cuda, ort_tensorrt
from attn_export.runtimes.base import LoadOptions
from tests.needed import needs

LIBRARY = libraries.provider_library("cuda")


def test_float32_is_computed_in_float32() -> None:
    made = ort_cuda.provider(LoadOptions())
    assert (made.name, made.options["use_tf32"]) == ("CUDAExecutionProvider", "0")


def test_the_callers_options_come_last() -> None:
    asked = LoadOptions(provider={"use_tf32": "1", "enable_cuda_graph": "1"})
    options = ort_cuda.provider(asked).options
    assert (options["use_tf32"], options["enable_cuda_graph"]) == ("1", "1")
    assert options["arena_extend_strategy"] == "kSameAsRequested"


@pytest.mark.skipif(LIBRARY is None, reason="onnxruntime-gpu is not installed")
@pytest.mark.parametrize(
    "name", [*ort_cuda.OPTIONS, *ort_cuda.OPTIONS.values(), "enable_cuda_graph"]
)
def test_every_option_is_one_that_the_provider_knows(name: str) -> None:
    assert LIBRARY is not None
    assert name.encode() in LIBRARY.read_bytes()


FORKED = """
import os
from attn_export.runtimes import ort_cuda
ort_cuda.availability()
print("libcuda" in open("/proc/self/maps").read())
"""


def test_asking_for_a_device_does_not_start_cuda_in_this_process(tmp_path: Path) -> None:
    """A process that did could not use CUDA in its forked children."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout == "False\n"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "runtime",
    [
        pytest.param(ort_cuda, marks=needs("ort-cuda")),
        pytest.param(ort_tensorrt, marks=needs("ort-tensorrt")),
    ],
)
def test_attention_runs_on_the_gpu(runtime: object, tmp_path: Path) -> None:
    options = LoadOptions(ranges={"tokens": (1, 16)}, cache=tmp_path)
    with runtime.load(graph().SerializeToString(), 1, options) as session:
        assert set(session.placement()) == {runtime.PROVIDER}
        for inputs, right in cases():
            np.testing.assert_allclose(session.run(inputs)["output"], right, rtol=0, atol=1e-5)


@pytest.mark.gpu
@needs("ort-tensorrt")
def test_engines_are_built_once(tmp_path: Path) -> None:
    import onnx

    path = tmp_path / "model.onnx"
    onnx.save(graph(), path)
    options = LoadOptions(ranges={"tokens": (1, 16)}, cache=tmp_path / "cache")
    compiled = ort_tensorrt.compile_ahead(path, options=options)
    before = {p: p.stat().st_mtime_ns for p in compiled.parent.rglob("*.engine")}
    assert before
    with ort_tensorrt.load(path, options=options) as session:
        for inputs, right in cases():
            np.testing.assert_allclose(session.run(inputs)["output"], right, rtol=0, atol=1e-5)
    assert {p: p.stat().st_mtime_ns for p in compiled.parent.rglob("*.engine")} == before
