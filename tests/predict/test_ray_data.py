"""A real Ray on this machine: actors die, runs are cut short, and no answer is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.boundary import SCRIPT, Cli
from tests.predict.test_reading import ends

ROWS, PART = 6_000, 100


def rows(folder: Path) -> np.ndarray:
    values = np.stack([np.arange(ROWS), np.zeros(ROWS)], axis=1).astype(np.float32)
    np.save(folder / "a.npy", values)
    return values


def arguments(classifier: Path, *more: str) -> list[str | Path]:
    return [
        "predict", classifier, "a.npy", "--engine", "ray", "--workers", "2", "--part-size",
        str(PART), "--batch-size", "1", "-o", "out", *more,
    ]  # fmt: skip


def told(folder: Path) -> list[tuple[str, float]]:
    """Every answer of the folder's parts, in the order of the parts."""
    lines = [
        json.loads(line)
        for path in sorted((folder / "out").glob("part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [(line["input"], line["top"][0]["score"]) for line in lines]


def wanted() -> list[tuple[str, float]]:
    return [(f"a.npy[{index}]", float(index)) for index in range(ROWS)]


def descendants(process: int) -> dict[int, str]:
    """Processes below one, with their command lines."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
                names[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    below = {process}
    for _ in range(len(parents)):
        more = {child for child, parent in parents.items() if parent in below} - below
        if not more:
            break
        below |= more
    return {child: names.get(child, "") for child in below - {process}}


def start(classifier: Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCRIPT, *map(str, arguments(classifier, "--json"))], cwd=folder, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for_parts(folder: Path, process: subprocess.Popen[str], count: int) -> None:
    limit = time.monotonic() + 120
    while len(list((folder / "out").glob("part-*.jsonl"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "no part appeared in two minutes"
        time.sleep(0.02)


def test_an_actor_that_is_killed_half_way_loses_nothing(classifier: Path, tmp_path: Path) -> None:
    rows(tmp_path)
    with start(classifier, tmp_path) as process:
        wait_for_parts(tmp_path, process, 3)
        actors = [pid for pid, name in descendants(process.pid).items() if "MapWorker" in name]
        assert actors
        os.kill(actors[0], signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    result = json.loads(stdout)
    assert (result["count"], result["parts"], result["parts_found"]) == (ROWS, ROWS // PART, 0)
    assert told(tmp_path) == wanted()
    assert not list((tmp_path / "out").glob(".*partial"))


@pytest.mark.slow
def test_a_run_that_was_cut_short_goes_on_where_it_was(
    cli: Cli, classifier: Path, tmp_path: Path
) -> None:
    rows(tmp_path)
    with start(classifier, tmp_path) as process:
        wait_for_parts(tmp_path, process, 3)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stderr.splitlines()[-1].startswith("Error: Interrupted")
    assert ends(process.pid)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("part-*.jsonl")}
    assert 3 <= len(before) < ROWS // PART
    ended = cli(*arguments(classifier, "--json"))
    assert ended.code == 0, ended.stderr
    assert ended.json["parts_found"] == len(before)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert told(tmp_path) == wanted()


def test_a_folder_of_another_job_is_left_alone(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """Nothing starts Ray here: the plan alone says no."""
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    other = cli(*arguments(classifier))
    assert other.code == 2
    assert other.sentence == "out holds other files than results; choose another -o."
    (tmp_path / "out" / "notes.txt").unlink()
    (tmp_path / "out" / "plan.json").write_text('{"format": "attn-export-results/1"}')
    (tmp_path / "out" / "part-000000.jsonl").write_text("{}\n")
    other = cli(*arguments(classifier))
    assert other.code == 2
    assert other.sentence.startswith("out holds results of another job (part_size, bundle, ")
    assert (tmp_path / "out" / "part-000000.jsonl").read_text() == "{}\n"


def test_no_cluster_is_one_sentence_and_3(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    ended = cli(*arguments(classifier, "--address", "127.0.0.1:1"))
    assert ended.code == 3
    assert ended.sentence.startswith("Ray does not answer at 127.0.0.1:1 (")
