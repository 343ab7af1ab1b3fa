"""Real processes: parity before speed, and a process that dies is one sentence."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from attn_export import benchmark
from attn_export.bench.machine import machine
from attn_export.bench.process import WorkerProcess
from attn_export.bench.result import Benchmark, Timing, require_parity
from attn_export.build import export
from attn_export.cli.bench_tables import bench_table, noise_lines
from attn_export.errors import AttnExportError, CheckFailed, RuntimeUnavailable, UsageError

Start = list[str]


def arguments(bundle: Path, runtime: str = "ort-cpu") -> list[str]:
    return [str(bundle), runtime, "model", "1", "batch=1"]


@pytest.fixture
def worker(digits_bundle: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess("ort-cpu", arguments(digits_bundle)) as process:
        yield process


@pytest.fixture(scope="module")
def measured(digits_bundle: Path) -> Benchmark:
    return benchmark(digits_bundle, seconds=0.5)


def test_torch_is_the_baseline_and_each_runtime_is_timed(measured: Benchmark) -> None:
    shown = measured.to_json()
    assert list(shown["runtimes"]) == ["torch", "ort-cpu"]
    assert shown["baseline"] == "torch"
    assert shown["runtimes"]["torch"]["ratio_to_baseline"] == 1.0
    for row in shown["runtimes"].values():
        assert row["parity"] == {"passed": True, "failures": []}
        assert 0 < row["median_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["median_low_ms"] <= row["median_ms"] <= row["median_high_ms"]
        assert row["runs"] >= 1
        assert row["rounds"] >= 1
        assert row["cold_start_ms"] > row["median_ms"]


def test_pytorch_computes_all_tokens_in_the_last_block_too(measured: Benchmark) -> None:
    """6 blocks of 24 S D^2 + 4 S^2 D, the patches and the head: S 17, D 64."""
    blocks, edges = 6 * (24 * 17 * 64**2 + 4 * 17**2 * 64), 2 * 16 * 64 * 4 + 2 * 64 * 10
    assert measured.timings["torch"].flops == blocks + edges
    assert measured.timings["ort-cpu"].flops == 9_100_032
    for row in measured.timings.values():
        assert row.peak_gflops is not None
        assert row.peak_gflops > 1


def test_the_ratio_is_this_median_over_the_baselines(measured: Benchmark) -> None:
    rows = measured.to_json()["runtimes"]
    assert rows["ort-cpu"]["ratio_to_baseline"] == pytest.approx(
        rows["ort-cpu"]["median_ms"] / rows["torch"]["median_ms"]
    )


def test_each_process_has_its_own_memory(measured: Benchmark) -> None:
    """Not this test process's, which has loaded PyTorch."""
    assert measured.timings["ort-cpu"].peak_rss_mb < measured.timings["torch"].peak_rss_mb
    assert 20 < measured.timings["ort-cpu"].peak_rss_mb < 250


def test_machine_and_versions_are_in_the_output(measured: Benchmark) -> None:
    shown = measured.to_json()
    assert shown["machine"]["cores"] == os.cpu_count()
    assert {"attn-export", "numpy", "python", "torch"} <= shown["versions"].keys()


def test_no_speed_is_told_where_parity_failed(wrong_bundle: Path) -> None:
    result = benchmark(wrong_bundle, seconds=0.2)
    row = result.to_json()["runtimes"]["ort-cpu"]
    assert row["parity"]["passed"] is False
    assert [row[key] for key in ("median_ms", "p90_ms", "p99_ms", "ratio_to_baseline")] == [
        None
    ] * 4
    assert row["runs"] == 0
    assert result.to_json()["runtimes"]["torch"]["parity"]["passed"]
    with pytest.raises(CheckFailed, match="ort-cpu was not timed since it differs from PyTorch"):
        require_parity(result)


def test_without_a_baseline_there_is_no_ratio() -> None:
    timing = Timing([[1.0]], 1.0, 1.0, {})
    assert Benchmark({"ort-cpu": timing}, None, "c", machine(1)).ratio("ort-cpu") is None


def test_a_worker_that_is_killed_is_one_sentence(worker: WorkerProcess) -> None:
    worker.ask("load")
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeUnavailable) as raised:
        worker.ask("run", seconds=0.1)
    assert str(raised.value) == (
        "the ort-cpu process ended during 'run' (killed by signal 9);"
        " leave ort-cpu out with --runtime."
    )


def test_a_worker_that_crashes_tells_its_last_words(tmp_path: Path) -> None:
    with (
        WorkerProcess("ort-cpu", arguments(tmp_path / "nothing")) as process,
        pytest.raises(RuntimeUnavailable, match=r"ended during 'load' \(.*is not a bundle"),
    ):
        process.ask("load")


def test_an_error_of_the_worker_is_raised_here_as_it_was_there(digits_bundle: Path) -> None:
    with (
        WorkerProcess("ort-cuba", arguments(digits_bundle, "ort-cuba")) as process,
        pytest.raises(UsageError, match="there is no runtime 'ort-cuba'"),
    ):
        process.ask("load")


def test_no_worker_outlives_its_block_however_busy_it_is(worker: WorkerProcess) -> None:
    worker.ask("load")
    stdin = worker._process.stdin
    assert stdin is not None
    stdin.write('{"do": "run", "seconds": 60}\n')
    stdin.flush()
    begun = time.perf_counter()
    with pytest.raises(AttnExportError), worker:
        raise AttnExportError("a", "b")
    assert worker._process.returncode == -signal.SIGKILL
    assert time.perf_counter() - begun < 20


CHATTY = """
import sys, torch
from torch import nn

class Chatty(nn.Module):
    def forward(self, x):
        print("x" * 4000)
        print("y" * 4000, file=sys.stderr)
        return x * 2

def build():
    return Chatty(), torch.ones(2, 4)
"""


def test_a_model_that_prints_neither_blocks_nor_confuses_its_worker(tmp_path: Path) -> None:
    """A pipe holds 64 KB: one that nobody reads would stop the model there for good."""
    (tmp_path / "chatty.py").write_text(CHATTY)
    bundle = export(f"{tmp_path / 'chatty.py'}:build", tmp_path / "bundle")
    case = bundle.cases()[0].name
    with WorkerProcess("torch", [str(bundle.path), "torch", "model", "1", case]) as process:
        alarm = subprocess.Popen(["sh", "-c", f"sleep 60; kill -9 {process._process.pid}"])
        try:
            process.ask("load")
            calls = 0
            while calls < 50:
                calls += len(process.ask("run", seconds=0.1)["ms"])
        finally:
            alarm.kill()
            alarm.wait()


UNSEEDED = """
import torch
from torch import nn

def build():
    return nn.Linear(4, 3), torch.ones(2, 4)

def bare():
    return nn.Linear(4, 3)
"""


@pytest.mark.parametrize(("factory", "inputs"), [("build", []), ("bare", ["input=float32[2,4]"])])
def test_the_worker_builds_the_same_model_again(
    tmp_path: Path, factory: str, inputs: list[str]
) -> None:
    """Also where weights are drawn without a seed, and where --input gave the example."""
    (tmp_path / "unseeded.py").write_text(UNSEEDED)
    source = f"{tmp_path / 'unseeded.py'}:{factory}"
    bundle = export(source, tmp_path / "bundle", inputs=inputs)
    begun = time.perf_counter()
    result = benchmark(bundle, seconds=0.2)
    assert result.passed
    assert time.perf_counter() - begun < 60


@pytest.mark.parametrize("component", ["encoder"])
def test_an_unknown_component_is_refused(digits_bundle: Path, component: str) -> None:
    with pytest.raises(UsageError, match="the bundle has no case for 'encoder'"):
        benchmark(digits_bundle, component=component)


def test_a_median_that_the_machine_was_too_busy_for_is_said() -> None:
    """A median of 420 in 9..431 is no figure to divide by; one of 1.00 in 0.99..1.01 is."""

    def timing(low: float, median: float, high: float) -> Timing:
        return Timing([[low, median, high]], cold_start_ms=1.0, peak_rss_mb=1.0, placement={})

    busy = {"torch": timing(9.0, 420.0, 431.0), "ort-cpu": timing(0.99, 1.0, 1.01)}
    here = {**machine(2), "load_average": 0.0}
    result = Benchmark(busy, "torch", "batch=1", here)
    assert result.noisy == pytest.approx({"torch": 211 / 420})
    assert result.to_json()["noisy"] == result.noisy
    line, _ = noise_lines(result)
    assert line.startswith("The median of torch is only known to about 50%")
    console = Console(width=200, file=io.StringIO())
    console.print(bench_table(result))
    assert "0.0024 ?" in console.file.getvalue()
    quiet = Benchmark({"ort-cpu": timing(0.99, 1.0, 1.01)}, None, "batch=1", here)
    assert quiet.noisy == {}
    assert "The median" not in " ".join(noise_lines(quiet))
