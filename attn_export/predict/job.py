"""One job of prediction: what it is made of, and the process that does a range of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.errors import AttnExportError, FileError, UsageError
from attn_export.extras import require
from attn_export.predict.answers import Answer
from attn_export.predict.opening import declared_by, samples_of, taken
from attn_export.predict.predictor import BATCH, Predictor
from attn_export.predict.reading import Sample
from attn_export.predict.sources import Samples
from attn_export.production.loading import AUTO

Range = tuple[int, int]


@dataclass(frozen=True)
class Job:
    """Everything that a process needs to answer any range of the samples; it may be pickled.

    Attributes:
        digest: of the manifest, so that a process that finds another bundle refuses.
        folder: where the names of inputs and drawings start.
        threads: of each process's session; None leaves them to the runtime.
        drawings: the folder of PNGs, if any.
    """

    bundle: Path
    digest: str
    samples: Samples
    folder: Path
    runtime: str = AUTO
    threads: int | None = None
    batch_size: int = BATCH
    top: int | None = None
    threshold: float | None = None
    drawings: Path | None = None

    def ranges(self, size: int) -> list[Range]:
        """All samples in ranges of `size`, in order."""
        total = len(self.samples)
        return [(start, min(start + size, total)) for start in range(0, total, size)]

    def identity(self) -> dict[str, Any]:
        """What must be equal for answers to be the same ones."""
        return {
            "bundle": self.digest,
            "runtime": self.runtime,
            "batch_size": self.batch_size,
            "top": self.top,
            "threshold": self.threshold,
            "drawings": str(self.drawings) if self.drawings else None,
            "inputs": self.samples.identity(),
        }

    def picture(self, index: int) -> Path:
        """Where a sample is drawn: by its file's name, numbered where names are not unique."""
        assert self.drawings is not None
        stem = self.samples[index][0].path.stem
        unique = self.samples.stems_differ
        return self.drawings / (f"{stem}.png" if unique else f"{index:06d}-{stem}.png")


def prepare(
    bundle: Path,
    inputs: Sequence[str],
    texts: Sequence[str] = (),
    *,
    runtime: str = AUTO,
    threads: int | None = None,
    batch_size: int = BATCH,
    top: int | None = None,
    threshold: float | None = None,
    drawings: Path | None = None,
) -> Job:
    """Read the bundle and list the inputs; nothing is run.

    Raises:
        FileError: the bundle is bad.
        UsageError: no such input, or one that the bundle cannot take.
        RuntimeUnavailable: a package that reads such inputs is not installed.
    """
    found = bundles.read(bundle)
    declared, signature = declared_by(found, top, threshold), taken(found)
    samples = samples_of(declared, signature, inputs, texts)
    if texts and declared.text is None:
        raise UsageError(f"{found.name} has no tokenizer for --text", "give arrays of token ids")
    if "image" in samples.kinds() or declared.text:
        require("predict")
    if drawings is not None and not declared.images:
        raise UsageError(f"--draw is for images, and {found.name} takes none", "leave it out")
    return Job(
        bundle.absolute(), found.digest(), samples, Path.cwd(), runtime, threads, batch_size, top,
        threshold, drawings,
    )  # fmt: skip


class Worker:
    """A session of a job in this process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        found = bundles.read(job.bundle)
        if found.digest() != job.digest:
            raise FileError(f"{job.bundle} has changed meanwhile", "start again")
        self.predictor = Predictor(
            found,
            job.runtime,
            threads=job.threads,
            batch_size=job.batch_size,
            declared=declared_by(found, job.top, job.threshold),
        )

    @property
    def runtime(self) -> str:
        return self.predictor.session.runtime

    def work(self, start: int, stop: int) -> list[Answer]:
        """The answers of a range of samples, in order; and their drawings."""

        def see(sample: Sample, answer: Answer) -> None:
            if self.job.drawings is not None and sample.image is not None:
                from attn_export.predict.drawing import draw

                place = self.job.picture(start + sample.position)
                draw(sample.image, answer, place)
                answer["drawn"] = str(place)

        answers = self.predictor.answer(self.job.samples.between(start, stop), see)
        if len(answers) != stop - start:
            raise AttnExportError(
                f"{len(answers)} answers came for {stop - start} samples", "report this"
            )
        return answers

    def close(self) -> None:
        self.predictor.close()
