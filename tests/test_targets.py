"""A graph for each target, and what is said of runtimes that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from attn_export import bundle as bundles
from attn_export import verify
from attn_export.attention.lowering import lower
from attn_export.bench.benchmark import benchmark
from attn_export.capability import STANDARD_ATTENTION
from attn_export.errors import RuntimeUnavailable, UsageError
from attn_export.exporting.exporter import Graph, to_onnx
from attn_export.models.spec import ExportSpec
from attn_export.parity.drawing import sizes_of
from attn_export.pipeline import Options, Outcome, export_and_verify
from attn_export.runtimes import openvino
from tests.attention.graphs import BATCH
from tests.boundary import Cli, edit_manifest
from tests.conftest import USER_MODEL
from tests.small_bundles import OFF_BY_ONE_PERCENT, small_bundle

TARGETS = ("cpu", "cuda", "tensorrt", "openvino")
CUDA_STAND_IN = "ort-cuda (stand-in: ort-cpu)"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A user's model, exported for the four targets."""
    folder = tmp_path_factory.mktemp("targets")
    (folder / "user_model.py").write_text(USER_MODEL)
    source = f"{folder / 'user_model.py'}:build"
    return export_and_verify(source, folder / "bundle", Options(TARGETS), lambda _: None)


def row(outcome: Outcome, target: str) -> dict[str, Any]:
    (found,) = (row for row in outcome.bundle.targets() if row["name"] == target)
    return found


@pytest.mark.parametrize(("target", "lowering", "status", "proved"), [
    ("cpu", "com.microsoft.Attention", "lowered", "run"),
    ("cuda", "com.microsoft.Attention", "lowered", "stand-in"),
    ("tensorrt", "decomposed", "decomposed-by-choice", "stand-in"),
    ("openvino", "ai.onnx.Attention", "lowered", "stand-in"),
])  # fmt: skip
def test_each_target_has_a_graph_of_its_own(
    made: Outcome, target: str, lowering: str, status: str, proved: str
) -> None:
    found = row(made, target)
    (site,) = found["sites"]
    assert (site["lowering"], site["status"], site["proved"]) == (lowering, status, proved)
    assert found["file"] == f"model.{target}.onnx"
    graph = onnx.load(made.bundle.path / found["file"], load_external_data=False).graph
    kinds = {f"{node.domain or 'ai.onnx'}.{node.op_type}" for node in graph.node}
    assert ("ai.onnx.Softmax" if lowering == "decomposed" else lowering) in kinds
    assert target != "tensorrt" or not any("microsoft" in kind for kind in kinds)


def test_the_plain_form_carries_the_rule_of_its_target(made: Outcome) -> None:
    (site,) = row(made, "tensorrt")["sites"]
    assert site["reason"].startswith("TensorRT fuses products and softmax itself")
    assert (row(made, "tensorrt")["lowered"], row(made, "tensorrt")["refused"]) == (0, 0)


def test_a_version_that_is_not_installed_is_assumed_and_said(made: Outcome) -> None:
    assert row(made, "tensorrt")["runtime_version"] == "10.16.1.11"
    assert row(made, "tensorrt")["assumed_version"] is True
    assert row(made, "cpu")["assumed_version"] is False
    assert (
        "the version of TensorRT for target tensorrt is assumed to be 10.16.1.11, since it is not"
        " installed here" in made.bundle.manifest["notes"]
    )


def test_a_stand_in_is_named_and_never_passes_for_the_runtime(made: Outcome) -> None:
    result = made.verification.to_json()["runtimes"]
    assert "ort-cuda" not in result
    assert result[CUDA_STAND_IN]["passed"]
    assert result[CUDA_STAND_IN]["stands_in_for"] == "ort-cuda"
    assert result["ort-cpu"]["stands_in_for"] is None
    assert [row(made, target)["checked"] for target in TARGETS[:3]] == ["run", *["stand-in"] * 2]
    assert any("checked on ort-cpu as a stand-in, not on ort-cuda" in note
               for note in made.bundle.manifest["notes"])  # fmt: skip


def test_verify_runs_what_is_here_and_says_what_is_not(made: Outcome) -> None:
    result = verify(made.bundle)
    assert result.passed
    assert set(result.runtimes) - {"openvino"} == {"ort-cpu"}
    assert set(result.unavailable) - {"openvino"} == {"ort-cuda", "ort-tensorrt"}
    assert ("openvino" in result.runtimes) is openvino.availability().ok


@pytest.mark.parametrize("command", [["verify"], ["bench", "--seconds", "0.2"]])
def test_a_runtime_that_is_asked_for_and_not_here_is_exit_3(
    cli: Cli, made: Outcome, command: list[str]
) -> None:
    ended = cli(*command, made.bundle.path, "--runtime", "ort-cuda")
    assert (ended.code, ended.stdout) == (3, "")
    assert ended.sentence.startswith("ort-cuda is not available because there is no NVIDIA ")


def test_verify_prints_the_way_out_whole(cli: Cli, made: Outcome) -> None:
    """Square brackets are no markup."""
    ended = cli("verify", made.bundle.path)
    assert ended.code == 0
    assert "ort-cuda was not checked, it is not available" in ended.stdout
    assert openvino.availability().ok or "pip install 'attn-export[openvino]'" in ended.stdout


def cuda_bundle(folder: Path) -> Path:
    """A bundle for cuda alone, whose graph is one percent off."""
    bundle = small_bundle(folder, OFF_BY_ONE_PERCENT)
    edit_manifest(bundle, lambda m: m["targets"][0].update(name="cuda", runtime="ort-cuda"))
    return bundle


def test_a_bundle_for_another_machine_alone_is_not_verified_here(tmp_path: Path) -> None:
    bundle = cuda_bundle(tmp_path / "b")
    with pytest.raises(RuntimeUnavailable, match="NVIDIA"):
        verify(bundle)
    with pytest.raises(RuntimeUnavailable, match="NVIDIA"):
        benchmark(bundle, seconds=0.1)


def test_a_wrong_graph_fails_on_the_stand_in(tmp_path: Path) -> None:
    result = verify(cuda_bundle(tmp_path / "b"), stand_ins=True)
    assert not result.passed
    assert "differ by more than 0.0001" in result.runtimes[CUDA_STAND_IN].failures[0]


def test_contrib_ops_for_tensorrt_are_refused_before_anything_is_loaded(cli: Cli) -> None:
    ended = cli("export", "nothing", "-o", "b", "--target", "tensorrt", "--lowering", "contrib")
    assert ended.code == 2
    assert ended.sentence == (
        "ort-tensorrt has no com.microsoft op, so --lowering contrib leaves nothing to lower to;"
        " choose auto, standard or decomposed, or another --target."
    )


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(2, (2, 8)).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)


def masked_graph() -> Graph:
    inputs = {"x": torch.randn(2, 5, 16), "mask": torch.ones(5, 5) > 0}
    return to_onnx(ExportSpec(Masked().eval(), inputs, {"x": {0: BATCH}}, ("y",)))


@pytest.mark.parametrize(("runtime", "choice", "lowering", "status"), [
    ("ort-cuda", "auto", STANDARD_ATTENTION, "lowered"),
    ("ort-tensorrt", "auto", "decomposed", "decomposed-by-choice"),
    ("ort-tensorrt", "standard", "decomposed", "refused"),
    ("openvino", "standard", STANDARD_ATTENTION, "lowered"),
    ("openvino", "decomposed", "decomposed", "decomposed-by-choice"),
])  # fmt: skip
def test_a_masked_site_on_each_runtime(
    runtime: str, choice: str, lowering: str, status: str
) -> None:
    graph = masked_graph()
    (outcome,) = lower(graph.model, runtime, sizes_of(graph.spec), choice).outcomes
    assert (outcome.lowering, outcome.status, outcome.proved) == (lowering, status, "stand-in")
    if status == "refused":
        assert outcome.code == "blocked-rows"
        assert "not known to give 0" in outcome.reason


def test_inspect_says_what_a_site_becomes_elsewhere(cli: Cli, made: Outcome) -> None:
    ended = cli("inspect", made.bundle.path, "--target", "tensorrt", "--json")
    (site,) = ended.json["sites"]
    assert (ended.code, site["lowering"], site["proved"]) == (0, "decomposed", "stand-in")


def test_an_unknown_lowering_is_a_usage_error_for_every_target() -> None:
    for runtime in ("ort-cpu", "ort-cuda", "ort-tensorrt", "openvino"):
        with pytest.raises(UsageError, match="no lowering 'fastest'"):
            lower(masked_graph().model, runtime, [], "fastest")


def test_answers_of_every_graph_are_pytorchs(made: Outcome) -> None:
    case = bundles.read(made.bundle.path).cases()[0]
    assert case.outputs
    for result in made.verification.runtimes.values():
        assert result.passed
        assert all(np.isfinite(c.max_abs) for _, c in result.comparisons)
