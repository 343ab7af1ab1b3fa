"""Files of every kind, through the command line, over a bundle that hands its input on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from tests.boundary import SCRIPT, Cli, edit_manifest

ROWS = np.array([[0.25, 0.75], [0.5, 0.125], [1.0, 2.0]], np.float32)


def best(results: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    return [(r["input"], r["top"][0]["label"], r["top"][0]["score"]) for r in results]


def test_each_kind_of_file_gives_its_rows_in_order(
    cli: Cli, classifier: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", ROWS)
    np.save(tmp_path / "one.npy", ROWS[1])
    np.savez(tmp_path / "b.npz", x=ROWS[:2])
    save_file({"x": ROWS}, tmp_path / "c.safetensors")
    (tmp_path / "d.jsonl").write_text('{"x": [1, 3], "id": "first"}\n\n{"x": [0.5, 0.25]}\n')
    columns = {"x": ROWS.tolist(), "label": [1, 0, 1]}
    pq.write_table(pa.table(columns), tmp_path / "e.parquet", row_group_size=2)
    names = ["e.parquet", "a.npy", "one.npy", "b.npz", "c.safetensors", "d.jsonl"]
    ended = cli("predict", classifier, *names, "--json", "--batch-size", "2")
    assert (ended.code, ended.stderr) == (0, "")
    three = [("yes", 0.75), ("no", 0.5), ("yes", 2.0)]
    assert best(ended.json["results"]) == [
        *((f"e.parquet[{i}]", *row) for i, row in enumerate(three)),
        *((f"a.npy[{i}]", *row) for i, row in enumerate(three)),
        ("one.npy", "no", 0.5),
        *((f"b.npz[{i}]", *row) for i, row in enumerate(three[:2])),
        *((f"c.safetensors[{i}]", *row) for i, row in enumerate(three)),
        ("d.jsonl:1", "yes", 3.0),
        ("d.jsonl:2", "no", 0.5),
    ]
    assert ended.json["results"][-2]["id"] == "first"
    assert ended.json["count"] == len(ended.json["results"]) == 14
    assert ended.json["runtime"] == "ort-cpu"
    assert ended.json["skipped"] == []


def test_folders_and_patterns_are_listed_by_name(
    cli: Cli, classifier: Path, tmp_path: Path
) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for index, name in enumerate(["b.npy", "deep/c.npy", "a.npy"]):
        np.save(tmp_path / "in" / name, ROWS[index])
    (tmp_path / "in" / "notes.md").write_text("not one of them")
    whole = cli("predict", classifier, "in", "--json").json["results"]
    assert [row["input"] for row in whole] == ["in/a.npy", "in/b.npy", "in/deep/c.npy"]
    some = cli("predict", classifier, "in/*.npy", "--json").json["results"]
    assert [row["input"] for row in some] == ["in/a.npy", "in/b.npy"]


def bad_files(folder: Path) -> dict[str, str]:
    """Files that cannot be answered -> what is said of each."""
    np.save(folder / "dtype.npy", ROWS.astype(np.float64))
    np.save(folder / "size.npy", np.zeros((2, 3), np.float32))
    np.save(folder / "axes.npy", np.zeros((1, 1, 2), np.float32))
    np.save(folder / "empty.npy", np.zeros((0, 2), np.float32))
    np.save(folder / "nan.npy", np.array([np.nan, 1], np.float32))
    np.save(folder / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(folder / "name.npz", z=ROWS)
    (folder / "broken.npz").write_bytes(b"PK\3\4 nothing")
    (folder / "broken.safetensors").write_bytes(b"\xff" * 40)
    (folder / "empty.jsonl").write_text("\n")
    (folder / "broken.parquet").write_bytes(b"PAR1 nothing")
    (folder / "picture.png").write_bytes(b"no picture")
    (folder / "notes.md").write_text("text")
    lines = [
        "{",
        "[1, 2]",
        '{"x": [[1], [2, 3]]}',
        '{"x": ["a", "b"]}',
        '{"z": 1}',
        '{"text": "a"}',
    ]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return {
        "dtype.npy[0]": "input 'x' is float64, the model takes float32",
        "size.npy[1]": "input 'x' has 3 on axis 1",
        "axes.npy": "'x' in axes.npy has 3 axes, the model takes 2",
        "empty.npy": "empty.npy holds no sample",
        "nan.npy": "output 'y' is not finite",
        "objects.npy": "objects.npy does not parse (",
        "name.npz": "name.npz has 'z', which is no input",
        "broken.npz": "broken.npz does not parse (",
        "broken.safetensors": "broken.safetensors does not parse (",
        "empty.jsonl": "empty.jsonl holds no line",
        "broken.parquet": "broken.parquet does not parse (",
        "picture.png": "picture.png is an image, and the bundle declares no `preprocess` for one",
        "notes.md": "notes.md is of no known kind",
        "lines.jsonl:1": "line 1 of lines.jsonl is no JSON (",
        "lines.jsonl:2": "line 2 of lines.jsonl is a list",
        "lines.jsonl:3": "'x' is ragged",
        "lines.jsonl:4": "'x' holds what is no float32",
        "lines.jsonl:5": "the model has no input 'z'",
        "lines.jsonl:6": "the bundle has no tokenizer for a text",
    }


def test_bad_files_are_named_and_skipped_and_the_others_answered(
    cli: Cli, classifier: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    told = bad_files(folder)
    np.save(folder / "good.npy", ROWS[0])
    np.save(folder / "last.npy", ROWS[2])
    names = ["good.npy", *sorted(p.name for p in folder.iterdir() if p.name not in
                                 ("good.npy", "last.npy")), "last.npy"]  # fmt: skip
    ended = cli("predict", classifier, *names, "--json", cwd=folder)
    assert ended.code == 5
    results = {row["input"]: row for row in ended.json["results"]}
    assert [row["input"] for row in ended.json["results"] if "error" not in row] == [
        "good.npy", "last.npy"
    ]  # fmt: skip
    for name, sentence in told.items():
        assert results[name]["error"].startswith(sentence), name
        assert f"Skipped {name}: {sentence}" in ended.stderr
    assert set(ended.json["skipped"]) == results.keys() - {"good.npy", "last.npy"}
    assert ended.stderr.splitlines()[-1].startswith("Error: 22 of 24 inputs were skipped (")
    assert "Traceback" not in ended.stderr
    allowed = cli("predict", classifier, *names, "--json", "--skip-bad", cwd=folder)
    assert (allowed.code, allowed.json) == (0, ended.json)


def test_json_lines_in_a_file_have_a_line_for_each_input(
    cli: Cli, classifier: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", ROWS)
    (tmp_path / "b.npy").write_bytes(b"bad")
    ended = cli("predict", classifier, "a.npy", "b.npy", "-o", "out/r.jsonl", "--skip-bad")
    assert ended.code == 0
    assert "Results: out/r.jsonl" in ended.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "r.jsonl").read_text().splitlines()]
    assert [row["input"] for row in rows] == ["a.npy[0]", "a.npy[1]", "a.npy[2]", "b.npy"]
    assert "error" in rows[3]
    before = (tmp_path / "out" / "r.jsonl").read_bytes()
    again = cli("predict", classifier, "a.npy", "-o", "out/r.jsonl")
    assert again.code == 2
    assert "out/r.jsonl exists; choose another -o, or add --overwrite." in again.sentence
    assert (tmp_path / "out" / "r.jsonl").read_bytes() == before
    assert cli("predict", classifier, "a.npy", "-o", "out/r.jsonl", "--overwrite").code == 0
    assert len((tmp_path / "out" / "r.jsonl").read_text().splitlines()) == 3
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["r.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no input is given"),
        (["nothing.npy"], "there is no file nothing.npy"),
        (["no*.npy"], "there is no file no*.npy"),
        (["--text", "a"], "small has no tokenizer for --text"),
        (["a.npy", "--draw", "d"], "--draw is for images, and small takes none"),
        (["a.npy", "--threshold", "0.5"], "--threshold is for detectors"),
        (["a.npy", "--runtime", "abacus"], "there is no runtime 'abacus'"),
        (["a.npy", "--engine", "ray"], "--engine ray needs a folder for its results"),
        (["empty"], "empty holds no file of a known kind"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence_and_2(
    cli: Cli, classifier: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    np.save(tmp_path / "a.npy", ROWS)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    ended = cli("predict", classifier, *arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.sentence.startswith(sentence)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        ({"postprocess": {"kind": "guess"}}, "postprocess.kind is 'guess', not one of classify"),
        ({"postprocess": {"kind": "embed", "output": "q"}}, "'q' is no output, the outputs are y"),
        ({"postprocess": {"kind": "embed"}}, "postprocess lacks 'output'"),
        ({"postprocess": {"kind": "generate"}}, "postprocess generates, and the model has no loop"),
        ({"preprocess": {"z": {}}}, "'z' is no input, the inputs are x"),
        ({"preprocess": []}, "preprocess is [], which is no object"),
        ({"preprocess": {"x": {"blur": 2}}}, "preprocess.x has 'blur', which is not known"),
        ({"preprocess": {"x": {"std": 0}}}, "preprocess.x: std is 0"),
        ({"preprocess": {"x": {"mean": [1, 2]}}}, "preprocess.x: mean has 2 numbers for 3"),
        ({"preprocess": {"x": {"resize": {"size": [0, 3]}}}}, "size is 0, not a whole number"),
        ({"preprocess": {"x": {"resize": {"size": 8}, "crop": {"size": 9}}}}, "crop (9, 9) is"),
        ({"tokenizer": {"file": "t.json", "inputs": {"x": "ids"}, "max_length": 4}},
         "lists no t.json"),
    ],
)  # fmt: skip
def test_a_malformed_declaration_is_one_sentence_and_5(
    cli: Cli, classifier: Path, tmp_path: Path, change: dict[str, Any], clause: str
) -> None:
    edit_manifest(classifier, lambda manifest: manifest.update(change))
    np.save(tmp_path / "a.npy", ROWS)
    ended = cli("predict", classifier, "a.npy")
    assert ended.code == 5
    assert clause in ended.sentence


def test_rows_that_depend_on_each_other_are_no_samples(
    cli: Cli, classifier: Path, tmp_path: Path
) -> None:
    edit_manifest(classifier, lambda manifest: manifest.update(rows_mix=["model"]))
    np.save(tmp_path / "a.npy", ROWS)
    ended = cli("predict", classifier, "a.npy")
    assert ended.code == 2
    assert ended.sentence.startswith("axis 0 of small is not a batch of independent samples")


def test_ctrl_c_ends_the_workers_and_leaves_no_results(classifier: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((400_000, 2), np.float32))
    command = [SCRIPT, "predict", classifier, "a.npy", "-o", "r.jsonl", "--workers", "2", "-v"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stderr is not None
        while " of 400000" not in (line := process.stderr.readline()):
            assert line, "it ended before it had begun"
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "Error: Interrupted; nothing half-written was left."
    assert "Traceback" not in stderr
    assert not list(tmp_path.glob("*r.jsonl*"))
    assert ends(process.pid)


def ends(group: int) -> bool:
    """Whether no process of a group is left, within ten seconds; one of Python's own ends last."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
