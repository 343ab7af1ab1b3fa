"""The machine as the system tells it, and the peak of its matrix products."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attn_export.bench import machine as module
from attn_export.bench.machine import differences, machine
from attn_export.bench.result import Benchmark, Timing
from attn_export.bench.roofline import peak_gflops
from attn_export.cli.bench_tables import noise_lines


def test_what_a_benchmark_says_of_its_machine() -> None:
    found = machine(1)
    assert (found["cores"], found["threads"]) == (os.cpu_count(), 1)
    assert found["memory_gb"] > 0.1
    assert found["load_average"] >= 0
    assert set(found["flags"]) <= set(module.TELLING_FLAGS)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("model name\t: A\nflags\t\t: fpu avx2 avx512f\n\nmodel name\t: B\nflags\t: fpu\n",
         "fpu avx2 avx512f"),
        ("Features\t: asimd bf16\n", "asimd bf16"),
    ],
)  # fmt: skip
def test_flags_are_the_first_processors(tmp_path: Path, text: str, flags: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert module._cpuinfo(tmp_path / "cpuinfo")["flags"] == flags


def test_the_load_is_no_difference_and_the_processor_is() -> None:
    one = {**machine(1), "load_average": 0.0}
    assert differences(one, {**one, "load_average": 9.0}) == []
    assert differences(one, {**one, "threads": 2}) == ["threads was 1 and is 2"]


def test_a_machine_that_was_busy_before_is_told() -> None:
    timing = Timing([[1.0] * 300], 1.0, 1.0, {})
    for load, lines in ((0.1, 0), (3.0, 1)):
        here = {**machine(1), "load_average": load}
        result = Benchmark({"ort-cpu": timing}, None, "c", here)
        assert result.busy is (load > 1)
        assert len(noise_lines(result)) == lines


@pytest.mark.parametrize("runtime", ["ort-cpu", "torch"])
def test_the_peak_is_between_a_scalar_loop_and_the_fastest_core(runtime: str) -> None:
    found = peak_gflops(runtime, 1, 0.1)
    assert found is not None
    assert 1 < found < 1000


def test_a_runtime_without_a_product_of_its_own_has_no_peak() -> None:
    assert peak_gflops("ort-tensorrt", 1, 0.1) is None


def test_achieved_is_arithmetic_over_time_and_its_share_of_the_peak() -> None:
    """2 GFLOP in 10 ms are 200 GFLOP/s, 80 % of 250."""
    shown = Timing([[10.0]], 1.0, 1.0, {}, flops=2 * 10**9, peak_gflops=250.0).to_json()
    assert (shown["gflops"], shown["share_of_peak"]) == (200.0, 0.8)
    assert (shown["product_gflop"], shown["rows_per_second"]) == (2.0, 100.0)
    unknown = Timing([[10.0]], 1.0, 1.0, {}).to_json()
    assert (unknown["gflops"], unknown["share_of_peak"]) == (None, None)
