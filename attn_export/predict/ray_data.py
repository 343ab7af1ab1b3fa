"""A job on a Ray cluster: Ray Data maps ranges of samples over actors with a session each.

Only the numbers of samples travel: actors read the inputs and write the parts themselves, so both
folders must be where every node sees them. An actor that dies is started again by Ray and its range
is done anew; a part is written whole or not at all, so nothing is lost and nothing is there twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_export import errors
from attn_export.errors import AttnExportError
from attn_export.extras import require
from attn_export.predict.answers import Answer
from attn_export.predict.job import Job, Worker
from attn_export.predict.parts import Parts, lay_out
from attn_export.ray_cluster import cluster
from attn_export.runtimes.threads import cores


@dataclass(frozen=True)
class Outcome:
    """What is there after a run.

    Attributes:
        found: parts that an earlier run had made.
        runtimes: those that made the others.
    """

    parts: Parts
    found: int
    runtimes: tuple[str, ...]

    def answers(self) -> Iterator[Answer]:
        return self.parts.answers()

    def to_json(self) -> dict[str, Any]:
        ranges = self.parts.ranges
        return {
            "folder": str(self.parts.folder),
            "count": ranges[-1][1],
            "parts": len(ranges),
            "parts_found": self.found,
            "runtime": ", ".join(self.runtimes),
        }


class PartWorker:
    """The actor. Its session opens with the first part, so that an error reaches the user."""

    def __init__(self, job: Job, parts: Parts) -> None:
        self.job, self.parts = job, parts
        self.worker: Worker | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        number = int(row["number"])
        start, stop = self.parts.ranges[number]
        done = {"count": stop - start, "runtime": "", "error": "", "told": ["", ""]}
        try:
            if self.worker is None:
                os.chdir(self.job.folder)  # actors start in a folder of Ray's
                self.worker = Worker(self.job)
            self.parts.write(number, self.worker.work(start, stop))
        except AttnExportError as error:
            told = [error.observed, error.way_out]
            return {**done, "error": type(error).__name__, "told": told}
        return {**done, "runtime": self.worker.runtime}


def run(
    job: Job,
    folder: Path,
    actors: int,
    part_size: int,
    address: str | None,
    overwrite: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Do what is missing of a job; with a second run after an interruption, the rest.

    Args:
        address: of a cluster ("auto" finds the one of this machine); None starts one here.
        advance: is told how many more samples are done.

    Raises:
        UsageError: the folder belongs to another job.
        RuntimeUnavailable: Ray is not installed, or no cluster answers.
        AttnExportError: as `Worker`.
    """
    require("ray")
    parts = lay_out(job, folder, part_size, overwrite)
    missing = parts.missing()
    advance(sum(stop - start for start, stop in parts.ranges))
    advance(-sum(parts.ranges[n][1] - parts.ranges[n][0] for n in missing))
    runtimes: set[str] = set()
    if missing:
        with cluster(address, max(cores(), actors)):
            for row in _mapped(job, parts, missing, actors):
                if row["error"]:
                    kind: type[AttnExportError] = getattr(errors, row["error"])
                    raise kind(*row["told"])
                runtimes.add(row["runtime"])
                advance(int(row["count"]))
    for _ in parts.answers():  # raises where anything is missing
        pass
    return Outcome(parts, len(parts.ranges) - len(missing), tuple(sorted(runtimes)))


def _mapped(job: Job, parts: Parts, missing: list[int], actors: int) -> Iterator[dict[str, Any]]:
    """A row a part, as they are done; each part is a block, so that little is done twice."""
    import ray.data

    # What is done is told by us; importing Ray Data sets the level of its log anew.
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = [{"number": number} for number in missing]
    actor: Any = PartWorker  # Ray takes a class here, its annotations a function alone
    data = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        actor,
        fn_constructor_args=(job, parts),
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(rows))),
        num_cpus=job.threads or 1,
    )
    yield from data.iter_rows()
