"""Reading a bundle trusts nothing; what is good reads back as it was written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attn_export import bundle as bundles
from attn_export.errors import FileError, UsageError
from tests.boundary import edit_manifest

Edit = Callable[[dict[str, Any]], object]
ENTRY = {"sha256": "0" * 64, "size": 1}


def refused(folder: Path) -> str:
    with pytest.raises(FileError) as raised:
        bundles.read(folder).cases()
    return str(raised.value)


def test_a_bundle_carries_what_the_format_asks_for(digits_bundle: Path) -> None:
    bundle = bundles.read(digits_bundle)
    assert {p.name for p in digits_bundle.iterdir()} == {*bundle.manifest["files"], "manifest.json"}
    assert bundle.manifest["inputs"] == [
        {"name": "image", "component": "model", "dtype": "float32",
         "shape": ["batch", 1, 8, 8], "ranges": {"batch": [1, 256]}}
    ]  # fmt: skip
    assert bundle.manifest["outputs"] == [
        {"name": "logits", "component": "model", "dtype": "float32",
         "shape": ["batch", 10], "compare": "elementwise"}
    ]  # fmt: skip
    assert [t["file"] for t in bundle.targets("model")] == ["model.cpu.onnx"]
    shapes = {case.name: case.outputs["logits"].shape for case in bundle.cases()}
    assert shapes == {"batch=1": (1, 10), "batch=3": (3, 10), "batch=2": (2, 10)}
    assert all(case.truth["logits"].dtype == np.float64 for case in bundle.cases())


def test_no_local_path_leaks_into_a_bundle(digits_bundle: Path) -> None:
    for path in digits_bundle.iterdir():
        assert str(Path(bundles.__file__).parent).encode() not in path.read_bytes()


def test_a_bundle_works_where_it_is_copied_to(bundle_copy: Path, digits_bundle: Path) -> None:
    assert bundles.read(bundle_copy).manifest == bundles.read(digits_bundle).manifest


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda m: m.update(format="attn-export-bundle/99"), "has format 'attn-export-bundle/99'"),
        (lambda m: m.pop("format"), "does not parse"),
        (lambda m: m.pop("files"), "has no valid 'files'"),
        (lambda m: m.update(targets={}), "has no valid 'targets'"),
        (lambda m: m.update(targets=[]), "has no valid 'targets'"),
        (lambda m: m.update(targets=["cpu"]), "has no valid 'targets'"),
        (lambda m: m["targets"][0].pop("runtime"), "has no valid 'targets'"),
        (lambda m: m["targets"][0].update(file="other.onnx"), "without its file"),
        (lambda m: m.update(components=[3]), "has no valid 'components'"),
        (lambda m: m.update(components=[]), "has no valid 'components'"),
        (lambda m: m["inputs"].append(7), "has no valid 'inputs'"),
        (lambda m: m["outputs"][0].pop("component"), "has no valid 'outputs'"),
        (lambda m: m["outputs"][0].update(component="x"), "has no valid 'outputs'"),
        (lambda m: m["outputs"][0].update(groups=[{"name": "a"}]), "has no valid 'outputs'"),
        (lambda m: m["files"].pop("reference.safetensors"), "lists no reference.safetensors"),
        (lambda m: m["files"].update({"weights.data": "abc"}), "has no valid 'files'"),
        (lambda m: m["files"].update({"extra.bin": ENTRY}), "extra.bin is missing"),
        (lambda m: m["files"].update({"/etc/passwd": ENTRY}), "unsafe file name '/etc/passwd'"),
        (lambda m: m["files"].update({"../x": ENTRY}), "unsafe file name '../x'"),
        (lambda m: m["files"].update({"a/../../x": ENTRY}), "unsafe file name"),
        (lambda m: m["files"].update({"..\\x": ENTRY}), "unsafe file name"),
        (lambda m: m["files"].update({"": ENTRY}), "unsafe file name ''"),
        (lambda m: m["files"].update({"manifest.json": ENTRY}), "unsafe file name"),
        (lambda m: m["files"].update({"a\0b": ENTRY}), "is missing"),
    ],
)  # fmt: skip
def test_a_manifest_that_lies_is_refused(bundle_copy: Path, edit: Edit, sentence: str) -> None:
    edit_manifest(bundle_copy, edit)
    assert sentence in refused(bundle_copy)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"format"', "\x00", "[" * 100_000, '{"format": NaN}'],
)  # fmt: skip
def test_a_manifest_that_is_no_object_is_refused(bundle_copy: Path, text: str) -> None:
    (bundle_copy / "manifest.json").write_text(text)
    assert "does not parse" in refused(bundle_copy) or "has format" in refused(bundle_copy)


def test_a_truncated_or_undecodable_manifest_is_refused(bundle_copy: Path) -> None:
    path = bundle_copy / "manifest.json"
    raw = path.read_bytes()
    for broken in (raw[: len(raw) // 2], b"\xff" + raw):
        path.write_bytes(broken)
        assert "does not parse" in refused(bundle_copy)


@pytest.mark.parametrize("name", ["model.cpu.onnx", "weights.data", "reference.safetensors"])
def test_one_flipped_bit_is_found(bundle_copy: Path, name: str) -> None:
    path = bundle_copy / name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert refused(bundle_copy).startswith(f"{path} is not the file that was exported")


@pytest.mark.parametrize("name", ["model.cpu.onnx", "weights.data", "reference.safetensors"])
def test_a_missing_or_truncated_file_is_found(bundle_copy: Path, name: str) -> None:
    path = bundle_copy / name
    path.write_bytes(path.read_bytes()[:-1])
    assert "is not the file that was exported" in refused(bundle_copy)
    path.unlink()
    assert refused(bundle_copy).startswith(f"{path} is missing; copy the whole bundle again")


@pytest.mark.parametrize("name", ["manifest.json", "weights.data"])
def test_a_link_is_refused_even_to_the_right_content(bundle_copy: Path, name: str) -> None:
    path = bundle_copy / name
    path.rename(bundle_copy.parent / name)
    path.symlink_to(bundle_copy.parent / name)
    assert refused(bundle_copy).startswith(f"{path} is a link")


def test_a_linked_folder_inside_of_a_bundle_is_refused(bundle_copy: Path) -> None:
    outside = bundle_copy.parent / "outside"
    outside.mkdir()
    shutil.move(bundle_copy / "weights.data", outside)
    (bundle_copy / "sub").symlink_to(outside)
    edit_manifest(
        bundle_copy, lambda m: m["files"].update({"sub/weights.data": m["files"]["weights.data"]})
    )
    edit_manifest(bundle_copy, lambda m: m["files"].pop("weights.data"))
    assert "is a link" in refused(bundle_copy)


def test_something_else_than_a_plain_file_is_refused(bundle_copy: Path) -> None:
    (bundle_copy / "weights.data").unlink()
    os.mkfifo(bundle_copy / "weights.data")
    assert "weights.data is missing" in refused(bundle_copy)


@pytest.mark.parametrize("place", ["nowhere", "empty", "file"])
def test_what_is_no_bundle_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert refused(tmp_path / place).startswith(f"{tmp_path / place} is not a bundle")


def test_unknown_keys_are_kept_when_a_file_is_added(bundle_copy: Path) -> None:
    edit_manifest(bundle_copy, lambda m: m.update(future={"a": [1, "é"]}))
    bundles.add_file(bundles.read(bundle_copy), "report.html", "<p>new</p>")
    manifest = json.loads((bundle_copy / "manifest.json").read_text())
    assert manifest["future"] == {"a": [1, "é"]}
    assert manifest["files"]["report.html"]["size"] == 10


def test_adding_a_file_vouches_for_that_file_alone(bundle_copy: Path) -> None:
    bundle = bundles.read(bundle_copy)
    (bundle_copy / "stray.txt").touch()
    (bundle_copy / "weights.data").write_bytes(b"forged")
    with pytest.raises(FileError, match=r"weights\.data is not the file that was exported"):
        bundles.add_file(bundle, "report.html", "x")
    assert "stray.txt" not in json.loads((bundle_copy / "manifest.json").read_text())["files"]


def test_a_runtime_without_a_graph_is_named(digits_bundle: Path) -> None:
    with pytest.raises(UsageError, match="has no graph for ort-cuda, it has targets cpu"):
        bundles.read(digits_bundle).target_for(["ort-cuda"], "model")
