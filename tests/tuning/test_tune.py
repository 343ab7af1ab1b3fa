"""`tune` end to end: real processes, a small bundle, little time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attn_export import bundle as bundles
from attn_export import load, tune, verify
from attn_export.errors import CheckFailed, RuntimeUnavailable, UsageError
from attn_export.runtimes.ort import OrtSession
from attn_export.runtimes.threads import cores
from tests.boundary import SCRIPT, Cli, Ended, edit_manifest, run

CPU, OPENVINO = "ort-cpu", "openvino"
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it raises
from attn_export.cli.main import main
main(sys.argv[1:])
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def tuned(digits_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A copy tuned from its files alone, in a process that cannot import torch."""
    folder = tmp_path_factory.mktemp("tuned") / "bundle"
    shutil.copytree(digits_bundle, folder)
    command = [sys.executable, "-c", WITHOUT_TORCH, "tune", folder, "--runtime", CPU,
               "--budget", "8", "--json"]  # fmt: skip
    return folder, run(command)


def test_a_bundle_is_tuned_from_its_files_without_pytorch(tuned: tuple[Path, Ended]) -> None:
    _, ended = tuned
    assert ended.code == 0, ended.stderr
    (target,) = ended.json["targets"]
    assert (target["runtime"], target["component"]) == (CPU, "model")
    stages = {row["stage"] for row in target["variants"]}
    assert "lowerings" in stages
    timed = [row for row in target["variants"] if row["median_ms"] is not None]
    assert {"plain export"} < {row["name"] for row in timed}
    assert all(row["median_ms"] > 0 and row["rounds"] >= 1 for row in timed)
    assert ended.json["runtimes"]["model"]["runtime"] == CPU
    assert ended.json["machine"]["cores"] >= 1


def test_what_was_found_is_in_a_sound_bundle(tuned: tuple[Path, Ended]) -> None:
    path, ended = tuned
    bundle = bundles.read(path)
    (target,) = bundle.targets()
    (shown,) = ended.json["targets"]
    assert target["tuned"]["chosen"] == shown["chosen"]
    assert target["tuned"]["why"]
    assert target["tuned"]["measured"] == shown["variants"]
    assert len(target["sites"]) == target["total"] == 6
    assert set(target["tuned"]["exported"].values()) <= {
        "com.microsoft.Attention", "ai.onnx.Attention"
    }  # fmt: skip
    assert verify(bundle, [CPU]).passed
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_inspect_tells_what_was_chosen_and_why(cli: Cli, tuned: tuple[Path, Ended]) -> None:
    path, _ = tuned
    (target,) = bundles.read(path).targets()
    shown = cli("inspect", path)
    assert shown.code == 0, shown.stderr
    assert f"Tuned: {target['tuned']['chosen']}" in " ".join(shown.stdout.split())
    assert cli("inspect", path, "--json").json["tuned"]["why"] == target["tuned"]["why"]


def test_load_takes_the_tuned_settings_and_runtime(tuned: tuple[Path, Ended]) -> None:
    path, _ = tuned
    (target,) = bundles.read(path).targets()
    with load(path) as session:
        assert session.runtime == CPU
        inner = session._sessions["model"]
        assert isinstance(inner, OrtSession)
        made = inner.inference_session.get_session_options()
        wanted = target["tuned"]["settings"].get("threads", cores())
        assert made.intra_op_num_threads == wanted


def test_tuning_again_starts_from_what_was_exported(
    tuned: tuple[Path, Ended], tmp_path: Path
) -> None:
    path, _ = tuned
    again = Path(shutil.copytree(path, tmp_path / "again"))
    result = tune(again, [CPU], budget=1.0, cache=False)
    (before,), (after,) = bundles.read(path).targets(), bundles.read(again).targets()
    assert after["tuned"]["exported"] == before["tuned"]["exported"]
    names = [row["name"] for row in result.to_json()["targets"][0]["variants"]]
    assert names[:2] == ["plain export", "as tuned before"]
    assert verify(again, [CPU]).passed


def test_what_there_was_no_time_for_is_told(bundle_copy: Path) -> None:
    """One alternative is measured whatever the budget is."""
    result = tune(bundle_copy, [CPU], budget=0.01, cache=False).to_json()
    (target,) = result["targets"]
    assert {row["name"] for row in target["variants"]} >= {"plain export", "ai.onnx.Attention"}
    told = "; ".join(result["not_measured"])
    assert "fusions of ort-cpu: plain export, sums fused (no time left)" in told
    assert "optimisation level extended" in told
    assert "site blocks.0.attn on ort-cpu at batch=1 (no time left)" in told


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_halfway_the_bundle_is_as_it_was(bundle_copy: Path, number: int) -> None:
    before = contents(bundle_copy)
    process = subprocess.Popen(
        [SCRIPT, "tune", bundle_copy, "--runtime", CPU, "--budget", "20", "-v"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("timing, round"):
            break
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143}[number]
    assert contents(bundle_copy) == before
    assert bundles.read(bundle_copy).targets()[0]["tuned"] is False
    if number != signal.SIGKILL:
        assert list(bundle_copy.parent.iterdir()) == [bundle_copy]


def test_a_bundle_whose_answers_are_wrong_is_not_tuned(wrong_bundle: Path) -> None:
    before = contents(wrong_bundle)
    with pytest.raises(CheckFailed, match="ort-cpu has other answers than PyTorch already"):
        tune(wrong_bundle, [CPU], budget=0.01, cache=False)
    assert contents(wrong_bundle) == before


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--budget", "0"], 2, "0.0 is not in the range"),
        (["--runtime", "torch"], 2, "'torch' is not tuned; those that are: ort-cpu"),
        (["--runtime", "ort-cuda"], 3, "ort-cuda is not available because"),
        (["--case", "nowhere"], 2, "there is no case 'nowhere'; choose batch=1, batch=3, batch=2"),
    ],
)
def test_a_wrong_request_is_a_sentence(
    cli: Cli, digits_bundle: Path, arguments: list[str], code: int, said: str
) -> None:
    ended = cli("tune", digits_bundle, *arguments)
    assert ended.code == code
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_bundle_for_other_places_alone_is_not_tuned(bundle_copy: Path) -> None:
    edit_manifest(bundle_copy, lambda m: m["targets"][0].update(name="web", runtime="ort-web"))
    with pytest.raises(UsageError, match="nothing that could be tuned, it has graphs for ort-web"):
        tune(bundle_copy, budget=0.01)
    edit_manifest(bundle_copy, lambda m: m["targets"][0].update(name="cuda", runtime="ort-cuda"))
    with pytest.raises(RuntimeUnavailable):
        tune(bundle_copy, budget=0.01)
