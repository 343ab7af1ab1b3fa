"""`--target web`: its graph, verified and timed on onnxruntime-web under Node.js."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import onnx
import pytest

from attn_export import bundle as bundles
from attn_export import verify
from attn_export.bench.benchmark import benchmark
from attn_export.build import export
from attn_export.runtimes import node, ort_web
from attn_export.storage import sha256
from tests.boundary import Cli, edit_manifest
from tests.needed import needs

WEB = [needs("ort-web"), pytest.mark.xdist_group("web")]


def web(test: object) -> object:
    """Marks a test that runs on ort-web."""
    for mark in WEB:
        test = mark(test)
    return test


@web
def test_the_graph_has_onnxs_own_attention_and_was_run(web_bundle: bundles.Bundle) -> None:
    (target,) = web_bundle.targets()
    assert (target["name"], target["runtime"], target["file"], target["checked"]) == (
        "web", "ort-web", "model.web.onnx", "run"
    )  # fmt: skip
    assert (target["runtime_version"], target["assumed_version"]) == ("1.30.0", False)
    assert {site["lowering"] for site in target["sites"]} == {"ai.onnx.Attention"}
    assert {site["proved"] for site in target["sites"]} == {"stand-in"}
    graph = onnx.load(web_bundle.model_path(target), load_external_data=False).graph
    assert [n.op_type for n in graph.node].count("Attention") == 6
    assert web_bundle.manifest["versions"]["onnxruntime-web"] == "1.30.0"
    assert web_bundle.manifest["notes"] == []


@web
def test_answers_and_accuracy_are_pytorchs(web_bundle: bundles.Bundle) -> None:
    result = verify(web_bundle)
    assert list(result.runtimes) == ["ort-web"]
    found = result.runtimes["ort-web"]
    assert found.passed
    assert {case for case, _ in found.comparisons} >= {"batch=1", "batch=3, row 2 alone"}
    assert all(0 < c.max_abs < 1e-4 for _, c in found.comparisons)
    assert found.metric == web_bundle.manifest["metric"]["reference"]
    assert found.placement.keys() == {"CPUExecutionProvider"}


@web
def test_wrong_weights_fail(web_bundle: bundles.Bundle, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(web_bundle.path, tmp_path / "copy"))
    raw = bytearray((copy / bundles.WEIGHTS).read_bytes())
    raw[3::4] = bytes(byte ^ 0x80 for byte in raw[3::4])  # the sign of each float32
    (copy / bundles.WEIGHTS).write_bytes(raw)
    entry = {"sha256": sha256(copy / bundles.WEIGHTS), "size": len(raw)}
    edit_manifest(copy, lambda manifest: manifest["files"].update({bundles.WEIGHTS: entry}))
    result = verify(copy, ["ort-web"])
    assert not result.passed
    assert "differ by more than" in result.runtimes["ort-web"].failures[0]


@web
def test_it_is_timed_with_the_memory_of_its_own_process(web_bundle: bundles.Bundle) -> None:
    result = benchmark(web_bundle, ["ort-web"], baseline="ort-web", seconds=0.3)
    timing = result.timings["ort-web"]
    assert timing.latency is not None
    assert timing.latency.median > 0
    assert timing.placement.keys() == {"CPUExecutionProvider"}
    assert timing.peak_rss_mb > 100  # the WebAssembly module alone takes most of that


@web
@pytest.mark.parametrize("arguments", [["verify"], ["bench", "--baseline", "ort-web"]])
def test_without_node_the_sentence_says_so(
    cli: Cli, web_bundle: bundles.Bundle, tmp_path: Path, arguments: list[str]
) -> None:
    command, *more = arguments
    ended = cli(command, web_bundle.path, *more, env={"PATH": str(tmp_path)})
    assert (ended.code, ended.stdout) == (3, "")
    assert "there is no Node.js: `node` is not on PATH; install Node.js 20 or newer" in (
        ended.sentence
    )


def test_without_node_the_graph_is_made_and_checked_on_a_stand_in(
    user_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ATTN_EXPORT_WEB", str(tmp_path))
    made = export(f"{user_model}:build", tmp_path / "bundle", targets=("web",))
    (target,) = made.targets()
    assert (target["runtime_version"], target["assumed_version"]) == ("1.30.0", True)
    assert target["checked"] == "stand-in"
    notes = made.manifest["notes"]
    assert any("onnxruntime-web for target web is assumed to be 1.30.0" in note for note in notes)
    assert any("not on ort-web, because there is no Node.js" in note for note in notes)
    assert verify(made, stand_ins=True).passed


def test_weights_that_no_browser_loads_are_told(
    user_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`qkv` has 48 x 16 float32 numbers, which are 3,072 bytes."""
    for largest, told in ((3071, 1), (3072, 0)):
        monkeypatch.setattr(ort_web, "LARGEST_FILE", largest)
        made = export(f"{user_model}:build", tmp_path / str(largest), targets=("web",))
        notes = [note for note in made.manifest["notes"] if "not in a page" in note]
        assert len(notes) == told
    cpu = export(f"{user_model}:build", tmp_path / "cpu")
    monkeypatch.setattr(ort_web, "LARGEST_FILE", 0)
    assert not any("not in a page" in note for note in cpu.manifest["notes"])


@needs("ort-web")
def test_the_worker_is_plain_javascript_that_node_parses() -> None:
    program, _ = node.node()
    done = subprocess.run([program, "--check", str(ort_web.WORKER)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
