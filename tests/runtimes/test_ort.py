"""ONNX Runtime sessions: real ones, and what is said where there can be none."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from attn_export import bundle as bundles
from attn_export.errors import FileError, RuntimeUnavailable, UsageError
from attn_export.runtimes import ort_cpu, torch_eager
from attn_export.runtimes.ort import OrtSession, Provider
from attn_export.runtimes.packages import OWNERS, onnxruntime_owner, version


@pytest.fixture
def session(digits_bundle: Path) -> Iterator[OrtSession]:
    with ort_cpu.load(digits_bundle / "model.cpu.onnx", threads=1) as loaded:
        yield loaded


def test_a_session_answers_by_name(session: OrtSession, digits_bundle: Path) -> None:
    case = bundles.read(digits_bundle).cases()[0]
    outputs = session.run(case.inputs)
    np.testing.assert_allclose(outputs["logits"], case.outputs["logits"], rtol=0, atol=1e-4)


def test_a_session_checks_its_inputs(session: OrtSession) -> None:
    with pytest.raises(UsageError, match="input 'image' is float64, the model takes float32"):
        session.run({"image": np.zeros((1, 1, 8, 8))})


def test_every_node_is_placed_where_it_was_asked_for(session: OrtSession) -> None:
    assert set(session.placement()) == {"CPUExecutionProvider"}


def test_unoptimised_and_optimised_answers_agree(digits_bundle: Path) -> None:
    inputs = bundles.read(digits_bundle).cases()[0].inputs
    path = digits_bundle / "model.cpu.onnx"
    plain, fused = (
        ort_cpu.load(path, optimize=flag).run(inputs)["logits"] for flag in (False, True)
    )
    np.testing.assert_allclose(plain, fused, rtol=0, atol=1e-4)


def test_a_provider_that_is_not_there_is_never_replaced_by_the_cpu(digits_bundle: Path) -> None:
    with pytest.raises(RuntimeUnavailable) as raised:
        OrtSession(
            "ort-nowhere", digits_bundle / "model.cpu.onnx", [Provider("QNNExecutionProvider")], 1
        )
    assert str(raised.value).startswith(
        "QNNExecutionProvider is not part of the installed onnxruntime"
    )


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_file_that_is_no_model_is_refused(content: bytes) -> None:
    with pytest.raises(FileError, match="refuses the model"):
        ort_cpu.load(content)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"refuses gone\.onnx"):
        ort_cpu.load(tmp_path / "gone.onnx")


def test_what_is_installed_is_found_available() -> None:
    owner, number = onnxruntime_owner()
    assert owner in OWNERS
    assert number == metadata.version(owner)
    assert ort_cpu.availability().ok
    assert torch_eager.availability().versions == {"torch": metadata.version("torch")}


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert version("no-such-package") is None


def test_two_owners_are_refused_and_told_apart(
    onnxruntime_twins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(onnxruntime_twins)
    with pytest.raises(RuntimeUnavailable) as raised:
        onnxruntime_owner()
    assert str(raised.value) == (
        "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1 are both installed and own the same folder;"
        " run `pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu`."
    )
    assert not ort_cpu.availability().ok
