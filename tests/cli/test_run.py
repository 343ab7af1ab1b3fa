"""The main job, end to end, on a trained model and on a user's own."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from attn_export import bundle as bundles
from attn_export.build import export
from attn_export.pipeline import fresh_folder
from tests.boundary import SCRIPT, Cli, Ended, edit_manifest, run

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Tags that are closed in order, text, and whatever the page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """`attn-export run vit-digits`, without -o."""
    folder = tmp_path_factory.mktemp("demo")
    return run([SCRIPT, "run", "vit-digits", "--seconds", "0.5"], cwd=folder), folder


def test_run_tells_sites_parity_accuracy_and_latency(demo: tuple[Ended, Path]) -> None:
    ended, _ = demo
    assert (ended.code, ended.stderr) == (0, "")
    assert "Attention sites: 6 counted, 6 recognised, 6 lowered" in ended.stdout
    assert ended.stdout.count("com.microsoft.Attention") == 5
    assert "left out of the graph: 3 MatMul, 1 Attention for row 0 alone" in ended.stdout
    assert "Parity with PyTorch: 3 cases (batch=1, batch=3, batch=2)" in ended.stdout
    assert "PyTorch 98.61%, ort-cpu 98.61% (the same)" in ended.stdout
    assert "baseline" in ended.stdout
    assert "Bundle: vit-digits-bundle" in ended.stdout


def test_run_without_an_output_makes_a_fresh_folder_each_time(
    demo: tuple[Ended, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [path.name for path in demo[1].iterdir()] == ["vit-digits-bundle"]
    monkeypatch.chdir(demo[1])
    assert fresh_folder("vit-digits") == Path("vit-digits-bundle-2")
    assert fresh_folder("some/file.py:build") == Path("build-bundle")


def test_the_bundle_of_run_is_sound_and_holds_its_report(demo: tuple[Ended, Path]) -> None:
    bundle = bundles.read(demo[1] / "vit-digits-bundle")
    assert "report.html" in bundle.manifest["files"]
    assert bundle.manifest["source"] == "vit-digits"
    assert bundle.manifest["labels"] == [str(digit) for digit in range(10)]


def test_the_report_is_well_formed_and_fetches_nothing(demo: tuple[Ended, Path]) -> None:
    text = (demo[1] / "vit-digits-bundle" / "report.html").read_text()
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert page.fetched == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    for told in ("6 of 6", "passed", "98.61", "blocks.5.attn", "com.microsoft.Attention", "torch"):
        assert told in page.text


def test_report_writes_the_page_again(cli: Cli, bundle_copy: Path, tmp_path: Path) -> None:
    assert cli("report", bundle_copy, "-o", "page.html").stdout == "Report: page.html\n"
    assert "passed" in Page((tmp_path / "page.html").read_text()).text
    again = cli("report", bundle_copy, "-o", "page.html")
    assert (again.code, again.sentence) == (
        2, "page.html exists; choose another -o, or add --overwrite.",
    )  # fmt: skip
    assert cli("report", bundle_copy, "-o", "page.html", "--overwrite").code == 0
    assert cli("report", bundle_copy).code == 0
    assert "report.html" in bundles.read(bundle_copy).manifest["files"]


def test_names_in_a_bundle_cannot_become_markup(cli: Cli, bundle_copy: Path) -> None:
    def forge(manifest: dict[str, object]) -> None:
        manifest.update(name="<script>alert(1)</script>", notes=["<img src=x>"])

    edit_manifest(bundle_copy, forge)
    assert cli("report", bundle_copy).code == 0
    page = Page((bundle_copy / "report.html").read_text())
    assert not {"script", "img"} & set(page.tags)
    assert "<script>alert(1)</script>" in page.text


def test_a_users_own_model_runs_end_to_end(cli: Cli, user_model: Path) -> None:
    arguments = ["--dynamic", "tokens=0:1..8", "--dynamic", "tokens=1:2..9", "--seconds", "0.2"]
    ended = cli("run", f"{user_model.name}:build", *arguments, "--json")
    assert ended.code == 0, ended.stderr
    shown = ended.json
    assert shown["bundle"] == "build-bundle"
    assert shown["targets"][0]["total"] == shown["targets"][0]["lowered"] == 1
    assert shown["verify"]["cases"] == [
        "batch=1 tokens_1=2", "batch=3 tokens_1=6", "batch=2 tokens_1=5", "batch=1 tokens_1=9",
    ]  # fmt: skip
    assert shown["bench"]["runtimes"]["torch"]["parity"]["passed"]
    assert shown["notes"] == ["the module was in train mode; it is exported in eval mode"]


def test_a_file_and_a_module_give_the_same_bundle(
    cli: Cli, user_model: Path, tmp_path: Path
) -> None:
    assert cli("export", "user_model:build", "-o", "module").code == 0
    export(f"{user_model}:build", tmp_path / "file")
    for name in ("reference.safetensors", "model.cpu.onnx", "weights.data"):
        assert (tmp_path / "module" / name).read_bytes() == (tmp_path / "file" / name).read_bytes()


def test_overwrite_replaces_a_bundle(cli: Cli, user_model: Path, bundle_copy: Path) -> None:
    ended = cli("export", f"{user_model}:build", "-o", bundle_copy, "--overwrite")
    assert ended.code == 0
    assert "Note: the module was in train mode; it is exported in eval mode." in ended.stdout
    assert bundles.read(bundle_copy).name == "build"
    assert not (bundle_copy / "metric.safetensors").exists()
