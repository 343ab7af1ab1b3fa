"""A folder of results in parts: each one appears complete, so that a later run does the rest.

`plan.json` says which bundle, inputs and options the parts belong to; `part-000003.jsonl` has the
answers of one range of inputs, a line each, in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_export.errors import FileError, UsageError
from attn_export.predict.answers import Answer
from attn_export.predict.job import Job, Range
from attn_export.storage import write_errors, write_file

PLAN = "plan.json"
PATTERN = "part-*.jsonl"
FORMAT = "attn-export-results/1"


@dataclass(frozen=True)
class Parts:
    """The ranges of a job and the files that hold their answers."""

    folder: Path
    ranges: tuple[Range, ...]

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.jsonl"

    def missing(self) -> list[int]:
        return [number for number in range(len(self.ranges)) if not self.path(number).is_file()]

    def write(self, number: int, answers: list[Answer]) -> None:
        """Put a part there, whole; a second writer of the same part changes nothing."""
        lines = (json.dumps(a, ensure_ascii=False, allow_nan=False) for a in answers)
        write_file(self.path(number), "".join(f"{line}\n" for line in lines))

    def answers(self) -> Iterator[Answer]:
        """All answers, in the order of the inputs.

        Raises:
            FileError: a part is missing, does not parse, or has more or fewer answers than inputs.
        """
        for number, (start, stop) in enumerate(self.ranges):
            path = self.path(number)
            try:
                found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            except (OSError, ValueError) as error:
                raise FileError(
                    f"{path} does not read ({error})", "delete it and run again"
                ) from error
            if len(found) != stop - start:
                raise FileError(
                    f"{path} has {len(found)} answers for {stop - start} inputs",
                    "delete it and run again",
                )
            yield from found


def lay_out(job: Job, folder: Path, size: int, overwrite: bool) -> Parts:
    """The parts of a job in a folder; those of an earlier run of the same job are kept.

    Raises:
        UsageError: the folder has results of another job (and `overwrite` is off), or other files.
        FileError: it could not be written.
    """
    plan = {"format": FORMAT, "part_size": size, **job.identity()}
    parts = Parts(folder.absolute(), tuple(job.ranges(size)))
    if folder.exists():
        _check(folder, plan, overwrite)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / PLAN, json.dumps(plan, ensure_ascii=False) + "\n")
    return parts


def _check(folder: Path, plan: dict[str, Any], overwrite: bool) -> None:
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file", "choose another -o")
    if not any(folder.iterdir()):
        return
    if not (folder / PLAN).is_file():
        raise UsageError(f"{folder} holds other files than results", "choose another -o")
    try:
        earlier = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except ValueError:
        earlier = {}
    if overwrite:
        with write_errors(folder):
            (folder / PLAN).unlink()
            for path in folder.glob(PATTERN):
                path.unlink()
    elif earlier != plan:
        keys = [key for key in plan if earlier.get(key) != plan[key]]
        raise UsageError(
            f"{folder} holds results of another job ({', '.join(keys)} differ)",
            "choose another -o, or add --overwrite",
        )
