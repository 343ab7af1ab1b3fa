"""Results in parts: what is missing, what is whole, and what belongs to another job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attn_export.errors import FileError, UsageError
from attn_export.predict.job import Job, Worker, prepare
from attn_export.predict.parts import Parts, lay_out


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.float32).reshape(5, 2))
    return tmp_path / "a.npy"


def job_of(classifier: Path, file: Path, **options: Any) -> Job:
    return prepare(classifier, [str(file)], threads=1, **options)


def fill(job: Job, parts: Parts, numbers: list[int]) -> None:
    worker = Worker(job)
    for number in numbers:
        parts.write(number, worker.work(*parts.ranges[number]))
    worker.close()


def test_parts_that_are_missing_are_done_by_a_later_run(
    classifier: Path, file: Path, tmp_path: Path
) -> None:
    job = job_of(classifier, file)
    parts = lay_out(job, tmp_path / "out", 2, overwrite=False)
    assert parts.ranges == ((0, 2), (2, 4), (4, 5))
    fill(job, parts, [2, 0])
    with pytest.raises(FileError, match=r"part-000001\.jsonl does not read"):
        list(parts.answers())
    again = lay_out(job_of(classifier, file), tmp_path / "out", 2, overwrite=False)
    assert again.missing() == [1]
    fill(job, again, [1])
    assert [row["top"][0]["score"] for row in again.answers()] == [1, 3, 5, 7, 9]
    assert [row["input"] for row in again.answers()] == [f"{file}[{i}]" for i in range(5)]


def test_a_part_with_too_few_answers_is_told(classifier: Path, file: Path, tmp_path: Path) -> None:
    job = job_of(classifier, file)
    parts = lay_out(job, tmp_path / "out", 2, overwrite=False)
    fill(job, parts, [0, 1, 2])
    whole = parts.path(1).read_text().splitlines()
    parts.path(1).write_text(whole[0] + "\n")
    with pytest.raises(FileError, match=r"part-000001\.jsonl has 1 answers for 2 inputs; delete"):
        list(parts.answers())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"size": 3}, "part_size differ"),
        ({"batch_size": 1}, "batch_size differ"),
        ({"top": 1}, "top differ"),
        ({"touch": True}, "inputs differ"),
        ({"bundle": True}, "bundle differ"),
    ],
)
def test_results_of_another_job_are_kept_unless_they_are_given_up(
    classifier: Path, file: Path, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    parts = lay_out(job_of(classifier, file), tmp_path / "out", 2, overwrite=False)
    parts.write(0, [{"input": "a"}])
    if change.pop("touch", False):
        os.utime(file, (1, 1))
    if change.pop("bundle", False):
        manifest = json.loads((classifier / "manifest.json").read_text())
        (classifier / "manifest.json").write_text(json.dumps({**manifest, "notes": ["new"]}))
    size = change.pop("size", 2)
    job = job_of(classifier, file, **change)
    with pytest.raises(UsageError, match=told):
        lay_out(job, tmp_path / "out", size, overwrite=False)
    assert parts.missing() == [1, 2]
    assert lay_out(job, tmp_path / "out", size, overwrite=True).path(0).exists() is False
