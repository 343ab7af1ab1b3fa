"""Node.js and its packages: what is said where they are not here, or too old."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes import node, ort_web
from attn_export.runtimes.packages import runtime_version
from tests.boundary import ROOT


def program(folder: Path, says: str, code: int = 0) -> Path:
    """A `node` that prints one line."""
    path = folder / "node"
    path.write_text(f"#!/bin/sh\necho {shlex.quote(says)}\nexit {code}\n")
    path.chmod(0o755)
    return path


def installed(folder: Path, version: str | None) -> Path:
    """A folder with an npm package in it, or with a broken one."""
    package = folder / "node_modules" / "onnxruntime-web"
    package.mkdir(parents=True)
    text = "{" if version is None else json.dumps({"version": version})
    (package / "package.json").write_text(text)
    return package


def test_without_node_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = ort_web.availability()
    assert (seen.ok, seen.observed) == (False, "there is no Node.js: `node` is not on PATH")
    assert seen.fix.startswith("install Node.js 20 or newer")
    with pytest.raises(RuntimeUnavailable, match="ort-web is not available because there is no"):
        ort_web.load(b"")


@pytest.mark.parametrize(("says", "code", "observed"), [
    ("v18.19.0", 0, "Node.js 18.19.0 is too old"),
    ("v6", 0, "Node.js 6 is too old"),
    ("hello", 0, "does not say its version (hello)"),
    ("", 7, "does not say its version (exit 7)"),
])  # fmt: skip
def test_a_node_that_is_too_old_or_broken_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, code: int, observed: str
) -> None:
    program(tmp_path, says, code)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert observed in ort_web.availability().observed


def test_the_newest_node_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path, "v25.1.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert node.node() == (str(path), "25.1.0")


def test_a_missing_package_is_told_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is run up to npm, which is not needed to see that it finds its files."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "v20.0.0")
    npm = tmp_path / "bin" / "npm"
    npm.write_text('#!/bin/sh\necho "$@" && ls "$4"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("ATTN_EXPORT_WEB", str(tmp_path / "a folder"))
    seen = ort_web.availability()
    assert seen.observed == "the npm package onnxruntime-web is not installed"
    command = seen.fix.removeprefix("run `").removesuffix("`")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    told, *files = done.stdout.splitlines()
    assert told == f"ci --ignore-scripts --prefix {tmp_path / 'a folder'}"
    assert files == ["package-lock.json", "package.json"]


def test_the_command_without_a_folder_of_ones_own_installs_beside_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ATTN_EXPORT_WEB", raising=False)
    assert node.install_command() == f"npm ci --ignore-scripts --prefix {node.FOLDER}"
    assert {path.name for path in node.FOLDER.iterdir()} >= {
        "package.json", "package-lock.json", "worker.mjs"
    }  # fmt: skip


def test_the_folder_that_is_named_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = installed(tmp_path, "1.2.3")
    monkeypatch.setenv("ATTN_EXPORT_WEB", str(tmp_path))
    assert node.package("onnxruntime-web") == (package, "1.2.3")
    assert node.package("other") is None
    assert runtime_version("ort-web") == ("1.2.3", False)


def test_what_lies_in_the_current_folder_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle's folder could hold one."""
    planted = installed(tmp_path, "6.6.6")
    monkeypatch.delenv("ATTN_EXPORT_WEB", raising=False)
    monkeypatch.chdir(tmp_path)
    found = node.package("onnxruntime-web")
    assert found is None or found[0] != planted


def test_a_package_that_does_not_say_its_version_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, None)
    monkeypatch.setenv("ATTN_EXPORT_WEB", str(tmp_path))
    assert node.package("onnxruntime-web") is None
    assert runtime_version("ort-web") == ("1.30.0", True)


def test_the_lock_pins_the_version_that_is_assumed_and_names_no_registry() -> None:
    lock = json.loads((node.FOLDER / "package-lock.json").read_text())
    assert lock["packages"]["node_modules/onnxruntime-web"]["version"] == "1.30.0"
    named = [entry for name, entry in lock["packages"].items() if name]
    assert all("integrity" in entry and "resolved" not in entry for entry in named)
    wanted = json.loads((node.FOLDER / "package.json").read_text())["dependencies"]
    assert wanted == {"onnxruntime-web": "1.30.0"}
    for name in ("package.json", "package-lock.json"):
        assert (ROOT / name).resolve() == (node.FOLDER / name).resolve()
