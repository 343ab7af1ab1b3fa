"""benchmarks/gpu.py on the CPU, so that it does not rot where there is no GPU."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
from rich.console import Console

from attn_export.runtimes import ort_cuda
from tests.boundary import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(gpu: ModuleType) -> dict[str, object]:
    found = gpu.measure("cpu", gpu.Sizes(batch=2, tokens=9, heads=2), 0.05, compiled=False)
    return {row.name: row for row in found}


def test_every_form_is_right_and_timed(rows: dict[str, object]) -> None:
    assert list(rows) == [
        "torch SDPA", "ort-cpu standard", "ort-cpu MultiHeadAttention", "ort-cpu decomposed",
    ]  # fmt: skip
    for row in rows.values():
        assert row.failure == ""
        assert row.error <= row.allowed < 1e-3
        assert row.latency.median > 0
        assert row.latency.runs >= 10


def test_nodes_are_told_by_provider(rows: dict[str, object]) -> None:
    assert rows["ort-cpu standard"].placement == "1 CPUExecutionProvider"
    assert rows["ort-cpu decomposed"].placement == "12 CPUExecutionProvider"


def test_the_truth_is_that_of_a_formula(gpu: ModuleType) -> None:
    sizes = gpu.Sizes(batch=1, tokens=3, heads=1)
    given = gpu.inputs(sizes, np.dtype(np.float32))
    q, k, v = (array[0].astype(np.float64) for array in given.values())
    weights = np.exp(q @ k.T / 8)
    right = weights / weights.sum(1, keepdims=True) @ v
    np.testing.assert_allclose(gpu.truth(sizes, given)[0], right, rtol=0, atol=1e-12)


def test_wrong_answers_get_no_time(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is lost: every form of ONNX Runtime differs, PyTorch's does not."""
    plain = gpu.build

    def unscaled(*arguments: object) -> object:
        model = plain(*arguments)
        for node in model.graph.node:
            if node.op_type == "Attention":
                node.attribute.append(gpu.helper.make_attribute("scale", 1.0))
        return model

    monkeypatch.setattr(gpu, "build", unscaled)
    found = gpu.measure("cpu", gpu.Sizes(1, 9, 1), 0.01, compiled=False)
    failures = {row.name: row.failure for row in found if row.failure}
    assert failures == {"ort-cpu standard": "not timed: its answers are wrong"}
    assert all((row.latency is None) == bool(row.failure) for row in found)


def test_the_table_has_a_ratio_to_pytorch(gpu: ModuleType, rows: dict[str, object]) -> None:
    console = Console(width=200, file=io.StringIO())
    console.print(gpu.table("title", list(rows.values())))
    text = console.file.getvalue()
    assert "1.00" in text
    assert text.count("not told") == 4


def test_what_is_printed_below_python_is_caught(gpu: ModuleType) -> None:
    with gpu.printed() as log:
        subprocess.run(["echo", "Operator=X Node=n FLASH_ATTENTION=1"], check=True)
    assert log == ["Operator=X Node=n FLASH_ATTENTION=1\n"]


@pytest.mark.skipif(ort_cuda.availability().ok, reason="there is an NVIDIA GPU here")
def test_without_a_device_it_is_skipped_with_the_reason() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Skipped: there is no NVIDIA driver on this machine")


@pytest.mark.gpu
@pytest.mark.skipif(
    not ort_cuda.availability().ok, reason=ort_cuda.availability().observed or "it runs"
)
def test_on_a_gpu_every_form_is_right(gpu: ModuleType) -> None:
    found = gpu.measure("cuda", gpu.Sizes(batch=2, tokens=200, heads=4), 0.1)
    assert [row.name for row in found if row.failure] == []
