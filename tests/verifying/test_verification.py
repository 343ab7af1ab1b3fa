"""`verify` says no where a bundle's answers are not PyTorch's, and only there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from attn_export import assert_parity, verify
from attn_export import bundle as bundles
from attn_export.cli.tables import fallback_lines
from attn_export.errors import CheckFailed, UsageError
from attn_export.reference import Case
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import Graph, LoadOptions
from attn_export.runtimes.ort import OrtSession
from attn_export.sessions import load
from tests.boundary import edit_manifest, reseal
from tests.small_bundles import FROZEN, IDENTITY, OFF_BY_ONE_PERCENT, Y, small_bundle


def test_a_good_bundle_passes_on_every_runtime(digits_bundle: Path) -> None:
    result = verify(digits_bundle, ["ort-cpu", "torch"])
    assert result.passed
    assert result.cases == ("batch=1", "batch=3", "batch=2")
    assert result.runtimes["torch"].worst()["logits"].max_abs <= 1e-6
    assert set(result.runtimes["ort-cpu"].placement) == {"CPUExecutionProvider"}


def test_the_held_out_score_is_the_same_on_both(digits_bundle: Path) -> None:
    result = verify(digits_bundle, ["ort-cpu", "torch"])
    assert result.metric is not None
    scores = {name: r.metric for name, r in result.runtimes.items()}
    assert scores == dict.fromkeys(("ort-cpu", "torch"), result.metric["reference"])
    assert result.metric["reference"] >= 0.97


def test_each_row_is_also_run_alone(digits_bundle: Path) -> None:
    labels = [case for case, _ in verify(digits_bundle).runtimes["ort-cpu"].comparisons]
    assert labels == [
        "batch=1",
        "batch=3", "batch=3, row 0 alone", "batch=3, row 1 alone", "batch=3, row 2 alone",
        "batch=2", "batch=2, row 0 alone", "batch=2, row 1 alone",
    ]  # fmt: skip


def test_corrupted_weights_fail(wrong_bundle: Path) -> None:
    result = verify(wrong_bundle)
    assert not result.passed
    with pytest.raises(CheckFailed, match=r"ort-cpu differs from PyTorch, batch=\d.*'logits'"):
        assert_parity(wrong_bundle)


def test_an_identity_passes_and_a_percent_in_one_column_does_not(tmp_path: Path) -> None:
    assert verify(small_bundle(tmp_path / "good", IDENTITY)).passed
    result = verify(small_bundle(tmp_path / "bad", OFF_BY_ONE_PERCENT))
    assert result.runtimes["ort-cpu"].failures[0] == (
        "case: output 'y': 2 of 4 elements differ by more than 0.0001, worst 0.005 at [0, 1]"
    )


def test_a_row_that_depends_on_its_neighbours_is_found(tmp_path: Path) -> None:
    """Both rows are alike, so that the whole batch agrees; one row alone doesn't run."""
    result = verify(small_bundle(tmp_path / "b", FROZEN))
    failures = result.runtimes["ort-cpu"].failures
    assert [line.split(":")[0] for line in failures] == ["case, row 0 alone", "case, row 1 alone"]
    assert "the runtime raised" in failures[0]
    assert "Reshape" in failures[0]


@pytest.mark.parametrize("groups", [False, True])
def test_rtol_is_relative_to_each_group(tmp_path: Path, groups: bool) -> None:
    """1 % of a score is within 2 % of all values' rms, and within 0.1 % of pixels', not its own."""
    folder = small_bundle(tmp_path / "b", OFF_BY_ONE_PERCENT, groups=groups)
    assert verify(folder, rtol=0.001, atol=0.0).passed is not groups
    assert verify(folder, rtol=0.02, atol=0.0).passed


def test_atol_is_absolute(tmp_path: Path) -> None:
    folder = small_bundle(tmp_path / "b", OFF_BY_ONE_PERCENT)
    assert verify(folder, rtol=0.0, atol=0.0051).passed
    assert not verify(folder, rtol=0.0, atol=0.0049).passed


@pytest.mark.parametrize(
    "tolerances", [(1e-3, None), (None, 1e-3), (-1.0, 0.0), (0.0, -1.0), (float("nan"), 0.0),
                   (0.0, float("inf"))],
)  # fmt: skip
def test_half_a_tolerance_or_one_that_is_no_bound_is_refused(
    digits_bundle: Path, tolerances: tuple[float | None, float | None]
) -> None:
    with pytest.raises(UsageError, match=r"--[ra]tol"):
        verify(digits_bundle, rtol=tolerances[0], atol=tolerances[1])


def test_no_cases_is_no_pass(tmp_path: Path) -> None:
    result = verify(small_bundle(tmp_path / "b", IDENTITY, cases=[]))
    assert not result.passed
    assert "nothing was compared" in result.runtimes["ort-cpu"].failures[0]


def test_a_component_without_cases_is_no_pass(tmp_path: Path) -> None:
    folder = small_bundle(tmp_path / "b", IDENTITY)

    def add_component(manifest: dict[str, object]) -> None:
        manifest["components"].append("decoder")
        (target,) = manifest["targets"]
        manifest["targets"].append({**target, "component": "decoder"})
        manifest["outputs"].append({**manifest["outputs"][0], "component": "decoder"})

    edit_manifest(folder, add_component)
    result = verify(folder)
    assert result.runtimes["ort-cpu"].failures == ["decoder: output 'y': nothing was compared"]


def test_an_output_that_pytorch_has_and_the_graph_lacks_fails(tmp_path: Path) -> None:
    allowed = {"y": {"all": 1.0}, "z": {"all": 1.0}}
    case = Case("case", "model", {"x": Y}, {"y": Y, "z": Y}, {}, allowed)
    result = verify(small_bundle(tmp_path / "b", IDENTITY, cases=[case]))
    assert "case: output 'z': the runtime did not return it" in result.runtimes["ort-cpu"].failures


def test_the_worst_group_is_shown(tmp_path: Path) -> None:
    result = verify(small_bundle(tmp_path / "b", OFF_BY_ONE_PERCENT, groups=True))
    worst = result.runtimes["ort-cpu"].worst()["y"]
    assert (worst.group, worst.passed) == ("score", False)


def test_json_has_no_nan_or_infinity(tmp_path: Path) -> None:
    bad = Y.copy()
    bad[0, 0] = np.nan
    case = Case("case", "model", {"x": bad}, {"y": Y}, {}, {"y": {"all": 1.0}})
    result = verify(small_bundle(tmp_path / "b", IDENTITY, cases=[case]))
    row = result.to_json()["runtimes"]["ort-cpu"]["outputs"]["y"]
    assert (row["max_abs"], row["cosine"], row["passed"]) == ("inf", "nan", False)


def test_an_unknown_runtime_is_answered_with_those_there_are(digits_bundle: Path) -> None:
    with pytest.raises(UsageError, match="no runtime 'ort-cuba'; the runtimes are torch, torch-c"):
        verify(digits_bundle, ["ort-cuba"])


def test_a_bundle_for_another_runtime_is_named(digits_bundle: Path) -> None:
    bundle = bundles.read(digits_bundle)
    target = {**bundle.manifest["targets"][0], "runtime": "ort-cuda"}
    other = replace(bundle, manifest={**bundle.manifest, "targets": [target]})
    with pytest.raises(UsageError, match="the bundle has no graph for ort-cpu"):
        load(other, "ort-cpu")


def test_a_graph_that_onnxruntime_refuses_is_a_bad_file(bundle_copy: Path) -> None:
    path = bundle_copy / "model.cpu.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOp"
    path.write_bytes(model.SerializeToString())
    reseal(bundle_copy)
    with pytest.raises(bundles.FileError, match=r"refuses model\.cpu\.onnx \(.*NoSuchOp"):
        verify(bundle_copy)


def test_attention_that_another_provider_ran_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a CUDA provider has no kernel of an op, and --allow-fallback lets that be."""
    folder = small_bundle(tmp_path / "b", IDENTITY)
    assert verify(folder, allow_fallback=True).runtimes["ort-cpu"].fallback == ""
    plain = ort_cpu.load

    def load_elsewhere(model: Graph, threads: int | None, options: LoadOptions) -> OrtSession:
        session = plain(model, threads, options)
        session.fallback = "SomeProvider runs Attention 'a', not CPUExecutionProvider"
        assert options.allow_fallback
        return session

    monkeypatch.setattr(ort_cpu, "load", load_elsewhere)
    result = verify(folder, allow_fallback=True)
    assert result.to_json()["runtimes"]["ort-cpu"]["fallback"].startswith("SomeProvider runs")
    assert fallback_lines(result) == [
        "ort-cpu passed some of its attention on: SomeProvider runs Attention 'a', not"
        " CPUExecutionProvider."
    ]
