"""`doctor` runs a model whose answers are known by hand, each runtime in its own process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_export.doctor import probe as doctor_probe
from attn_export.doctor.doctor import FAIL, PASS, UNAVAILABLE, Diagnosis, Finding, diagnose, probe
from attn_export.errors import RuntimeUnavailable, UsageError
from attn_export.runtimes import ort_cuda, table
from tests.boundary import Cli

no_gpu = pytest.mark.skipif(ort_cuda.availability().ok, reason="there is an NVIDIA GPU here")


def test_the_answers_worked_out_by_hand_are_those_of_float64() -> None:
    for inputs, right in doctor_probe.cases():
        query, key, value = (inputs[n][0, 0].astype(np.float64) for n in ("query", "key", "value"))
        weights = np.tril(np.exp(query @ key.T))
        np.testing.assert_allclose(
            weights / weights.sum(1, keepdims=True) @ value, right[0, 0], rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("runtime", ["ort-cpu", "onnx-reference", "torch"])
def test_what_works_here_passes(runtime: str) -> None:
    found = doctor_probe.examine(runtime)
    assert (found["status"], found["observed"]) == (PASS, "")
    assert found["ms"] > 0


def test_a_wrong_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ((inputs, right), _) = doctor_probe.cases()
    monkeypatch.setattr(doctor_probe, "cases", lambda: [(inputs, right + 0.01)])
    found = doctor_probe.examine("ort-cpu")
    assert found["status"] == FAIL
    assert found["observed"] == (
        "it answered [0.0, 0.5, 1.0, 1.5] where"
        f" {(right + np.float32(0.01))[0, 0, :, 0].tolist()} is right"
    )


CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
HANGS = "import time; time.sleep(60)"
RAISES = "raise ImportError('libsomething.so: cannot open shared object file')"


@pytest.mark.parametrize(
    ("code", "observed"),
    [
        (CRASHES, "its process was ended by signal 11"),
        (HANGS, "it did not answer within 1 s"),
        (RAISES, "its process ended without an answer (ImportError: libsomething.so: cannot open"
                 " shared object file)"),
    ],
)  # fmt: skip
def test_a_runtime_that_crashes_or_hangs_does_not_take_the_doctor_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, observed: str
) -> None:
    (tmp_path / "broken_probe.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe("ort-cpu", 1.0, "broken_probe")
    assert (found.status, found.observed) == (FAIL, observed)


def test_what_a_library_prints_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noisy_probe.py").write_text(
        "print('hello'); print('{\"status\": \"pass\", \"ms\": 1.0}'); print('bye')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe("ort-cpu", 30.0, "noisy_probe") == Finding("ort-cpu", PASS, ms=1.0)


def test_the_cpu_must_work_and_what_was_asked_for() -> None:
    cpu, cuda = Finding("ort-cpu", PASS), Finding("ort-cuda", UNAVAILABLE, "no device", "add one")
    Diagnosis([cpu, cuda]).require()
    with pytest.raises(RuntimeUnavailable) as raised:
        Diagnosis([cpu, cuda], ["ort-cuda"]).require()
    assert str(raised.value) == "ort-cuda is not available because no device; add one."
    with pytest.raises(RuntimeUnavailable, match="ort-cpu does not work because it answered 1"):
        Diagnosis([Finding("ort-cpu", FAIL, "it answered 1", "leave it"), cuda]).require()


def test_an_unknown_runtime_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="no runtime 'ort-cuba'; the runtimes are torch, torch-c"):
        diagnose(["ort-cuba"])


def test_doctor_prints_json(cli: Cli) -> None:
    ended = cli("doctor", "--runtime", "ort-cpu", "--json")
    assert ended.code == 0
    row = ended.json["runtimes"]["ort-cpu"]
    assert (row["status"], row["fix"], ended.json["passed"]) == (PASS, "", True)
    assert row["versions"].keys() & {"onnxruntime", "onnxruntime-gpu"}


@no_gpu
def test_a_runtime_that_is_asked_for_and_does_not_work_is_exit_3(cli: Cli) -> None:
    ended = cli("doctor", "--runtime", "ort-cuda", "--runtime", "ort-cpu")
    assert ended.code == 3
    assert "not available" in ended.stdout
    assert "PASS" in ended.stdout
    assert "ort-cuda libraries missing: " in ended.stdout
    assert ended.sentence.startswith("ort-cuda is not available because there is no NVIDIA ")


def test_every_runtime_is_in_the_table() -> None:
    assert table.names()[:8] == [
        "torch", "torch-compile", "ort-cpu", "ort-cuda", "ort-tensorrt", "openvino",
        "ort-web", "onnx-reference",
    ]  # fmt: skip
    assert {table.availability(name).runtime for name in table.names()} == set(table.names())
