"""PyTorch's own runtimes, and ONNX's evaluator: three answers to one question."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from attn_export import bundle as bundles
from attn_export.doctor.probe import cases, session
from attn_export.errors import FileError, RuntimeUnavailable, UsageError
from attn_export.runtimes import onnx_reference, torch_compile
from attn_export.runtimes.base import LoadOptions, TensorSpec
from attn_export.sessions import load
from tests.small_bundles import IDENTITY, small_bundle

COMPILES = torch_compile.availability()
compiles = pytest.mark.skipif(not COMPILES.ok, reason=COMPILES.observed or "it compiles")


@compiles
def test_a_compiled_module_answers_as_the_module_does(tmp_path: Path) -> None:
    with session("torch-compile", tmp_path) as loaded:
        for inputs, right in cases():
            np.testing.assert_allclose(loaded.run(inputs)["output"], right, rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="this torch-compile session is closed"):
        loaded.run(cases()[0][0])


def test_without_a_compiler_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeUnavailable) as raised:
        torch_compile.availability().require()
    assert str(raised.value) == (
        "torch-compile is not available because torch.compile needs a C++ compiler, and"
        " 'no-such-compiler' was not found; install g++, or name another one in CXX."
    )


class Untraceable(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1


def test_a_module_that_does_not_compile_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: plain(module, fullgraph=True))
    spec = TensorSpec("x", "float32", (2,))
    with torch_compile.CompiledSession(Untraceable(), [spec], ["y"]) as loaded:  # noqa: SIM117
        with pytest.raises(RuntimeUnavailable, match="does not compile the model"):
            loaded.run({"x": np.zeros(2, np.float32)})


def test_onnx_evaluates_a_bundles_standard_graph(tmp_path: Path) -> None:
    bundle = bundles.read(small_bundle(tmp_path / "b", IDENTITY))
    case = bundle.cases()[0]
    with load(bundle, "onnx-reference") as loaded:
        assert loaded.inputs == (TensorSpec("x", "float32", ("batch", 2)),)
        assert loaded.placement() == {"numpy": 1}
        np.testing.assert_array_equal(loaded.run(case.inputs)["y"], case.outputs["y"])


@pytest.mark.parametrize("content", [b"nonsense", b""])
def test_a_file_that_is_no_model_is_refused(content: bytes) -> None:
    with pytest.raises(FileError):
        onnx_reference.load(content)


def test_a_size_out_of_range_is_refused_before_the_runtime(tmp_path: Path) -> None:
    loaded = session("ort-cpu", tmp_path)
    loaded.ranges = {"tokens": (1, 3)}
    (long, _), (short, _) = cases()
    assert loaded.run(short)["output"].shape == (1, 1, 2, 8)
    with loaded, pytest.raises(UsageError) as raised:
        loaded.run(long)
    assert str(raised.value) == (
        "'tokens' is 4 in input 'query', the model takes 1 to 3; split the request, or export with"
        " a wider --dynamic range."
    )


def test_a_trace_leaves_a_record_of_every_node(tmp_path: Path) -> None:
    from attn_export.doctor.probe import graph
    from attn_export.runtimes import ort_cpu

    options = LoadOptions(trace=tmp_path)
    with ort_cpu.load(graph().SerializeToString(), 1, options) as loaded:
        loaded.run(cases()[0][0])
    (record,) = tmp_path.glob("profile*.json")
    assert "attention_kernel_time" in record.read_text()
