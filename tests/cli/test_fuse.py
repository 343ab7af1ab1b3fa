"""`attn-export fuse`: codes, sentences, JSON, and what is left on the disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.boundary import Cli
from tests.file_graphs import attention, unfusable, wide


def test_0_the_table_the_parity_and_the_file(cli: Cli, tmp_path: Path) -> None:
    attention(tmp_path / "m.onnx", 11)
    ended = cli("fuse", "m.onnx", "-o", "out.onnx", "--require", "all")
    assert (ended.code, ended.stderr) == (0, "")
    assert "1 counted, 1 recognised, 1 lowered" in ended.stdout
    assert (
        "Parity with the given file: 2 cases (batch=1 tokens=7, batch=3 tokens=12)" in ended.stdout
    )
    assert "Note: opset 11 was converted to 23." in ended.stdout
    assert "Written: out.onnx" in ended.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "out.onnx"}


def test_torch_is_not_needed(cli: Cli, tmp_path: Path) -> None:
    attention(tmp_path / "m.onnx")
    profile = {"PYTHONPROFILEIMPORTTIME": "1"}
    ended = cli("fuse", "m.onnx", "-o", "out.onnx", env=profile)
    imported = set(re.findall(r"\|\s+(\w+)$", ended.stderr, re.MULTILINE))
    assert ended.code == 0
    assert "onnxruntime" in imported
    assert "torch" not in imported


def test_json_is_inspects_object_and_more(cli: Cli, tmp_path: Path) -> None:
    attention(tmp_path / "m.onnx")
    fused = cli("fuse", "m.onnx", "-o", "out.onnx", "--json").json
    seen = cli("inspect", "m.onnx", "--json").json
    more = {key: fused.pop(key) for key in ("output", "verify")}
    assert fused == seen
    assert more["output"] == "out.onnx"
    assert more["verify"]["passed"] is True
    assert more["verify"]["runtimes"]["ort-cpu"]["outputs"]["y"]["passed"] is True


def test_1_nothing_is_written_where_a_check_says_no(cli: Cli, tmp_path: Path) -> None:
    unfusable(tmp_path / "m.onnx")
    ended = cli("fuse", "m.onnx", "-o", "out.onnx", "--require", "all", "--json")
    assert (ended.code, ended.json["output"], ended.json["refused"]) == (1, None, 1)
    assert "was refused (weights-used" in ended.stderr.splitlines()[-1]
    assert "1 counted" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_inspect_requires_and_excuses_too(cli: Cli, tmp_path: Path) -> None:
    unfusable(tmp_path / "m.onnx")
    asked = ("inspect", "m.onnx", "--require", "all")
    assert cli(*asked).code == 1
    assert cli(*asked, "--excuse", "weights-used").code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fuse", "m.onnx"], "Missing option '-o'"),
        (["fuse", "m.onnx", "-o", "m.onnx", "--overwrite"], "would replace the file that is read"),
        (["fuse", "m.onnx", "-o", "m.onnx"], "m.onnx exists; choose another -o"),
        (["fuse", "m.onnx", "-o", "o.onnx", "--target", "abacus"], "there is no target 'abacus'"),
        (["fuse", "m.onnx", "-o", "o.onnx", "--require", "most"], "--require most does not parse"),
        (["fuse", "m.onnx", "-o", "o.onnx", "--lowering", "best"], "'best' is not one of"),
    ],
)
def test_2_usage(cli: Cli, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    attention(tmp_path / "m.onnx")
    ended = cli(*arguments)
    assert ended.code == 2
    assert sentence in ended.sentence
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("command", [["inspect", "m.onnx"], ["fuse", "m.onnx", "-o", "out.onnx"]])
@pytest.mark.parametrize("content", [None, b"", b"\x08\x08", b"not an onnx file"])
def test_5_a_bad_file(cli: Cli, tmp_path: Path, command: list[str], content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "m.onnx").write_bytes(content)
    ended = cli(*command)
    assert ended.code == 5
    assert "m.onnx" in ended.sentence
    assert not (tmp_path / "out.onnx").exists()


def test_5_a_full_disk_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    wide(tmp_path / "m.onnx")  # 4 KB of weights
    ended = cli("fuse", "m.onnx", "-o", "out.onnx", preexec_fn=_tiny_files)
    assert ended.code == 5
    assert "could not be written (File too large)" in ended.sentence
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def _tiny_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
