"""Where the answers of `predict` go: a table, JSON, JSON lines, a folder of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attn_export.cli.options import Output
from attn_export.cli.plain_table import plain_table
from attn_export.errors import FileError, UsageError
from attn_export.predict.answers import Answer
from attn_export.predict.job import Job
from attn_export.storage import write_errors

SHOWN = 5  # names of skipped inputs in the closing sentence


def locally(
    job: Job, file: Path | None, workers: int, overwrite: bool, skip_bad: bool, output: Output
) -> None:
    """Run a job here and tell its answers; exits 5 where inputs were skipped."""
    from attn_export.predict.local import run

    if file is not None and file.exists() and (file.is_dir() or not overwrite):
        raise UsageError(f"{file} exists", "choose another -o, or add --overwrite")
    answers: list[Answer] = []
    skipped: list[Answer] = []
    runtimes: set[str] = set()
    lines = nullcontext() if file is None else appearing(file)
    with lines as written, bar(len(job.samples), output) as advance:
        for runtime, part in run(job, workers):
            runtimes.add(runtime)
            advance(len(part))
            skipped += [answer for answer in part if "error" in answer]
            if written is None:
                answers += part
            else:
                written("".join(map(json_line, part)))
    if file is None:
        print_answers(answers, output)
    total = {
        "bundle": str(job.bundle),
        "runtime": ", ".join(sorted(runtimes)),
        "count": len(job.samples),
    }
    place = {"results": answers} if file is None else {"file": str(file)}
    finish({**total, **place}, skipped, skip_bad, output)


def on_ray(
    job: Job,
    folder: Path | None,
    workers: int,
    part_size: int,
    address: str | None,
    overwrite: bool,
    skip_bad: bool,
    output: Output,
) -> None:
    """Run a job on Ray into a folder of parts; exits 5 where inputs were skipped."""
    from attn_export.predict.ray_data import run

    if folder is None:
        raise UsageError("--engine ray needs a folder for its results", "add -o DIR")
    with bar(len(job.samples), output) as advance:
        outcome = run(job, folder, workers, part_size, address, overwrite, advance)
    skipped = [answer for answer in outcome.answers() if "error" in answer]
    finish({"bundle": str(job.bundle), **outcome.to_json()}, skipped, skip_bad, output)


def finish(
    result: dict[str, Any], skipped: Sequence[Answer], skip_bad: bool, output: Output
) -> None:
    """Say what was skipped and where the rest is; exit 5 unless that was asked for."""
    names = [str(answer["input"]) for answer in skipped]
    for answer in skipped:
        click.echo(f"Skipped {answer['input']}: {answer['error']}", err=True)
    if place := result.get("file") or result.get("folder"):
        output.console.print(f"Results: {place}", markup=False)
    output.result({**result, "skipped": names})
    if skipped and not skip_bad:
        told = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        seen = f"{len(names)} of {result['count']} inputs were skipped ({told})"
        error = FileError(seen, "mend them, or add --skip-bad")
        click.echo(f"Error: {error}", err=True)
        raise click.exceptions.Exit(error.exit_code)


def print_answers(answers: Sequence[Answer], output: Output) -> None:
    """A table, a row an input, where no JSON was asked for."""
    if output.json:
        return
    table = plain_table("", "input", "answer")
    for answer in answers:
        if "error" not in answer:
            table.add_row(str(answer["input"]), summary(answer))
    output.console.print(table, markup=False)


def summary(answer: Answer) -> str:
    """An answer in a line."""
    if "top" in answer:
        return ", ".join(f"{row['label']} {row['score']:.3f}" for row in answer["top"])
    if "detections" in answer:
        return "\n".join(_box(row) for row in answer["detections"]) or "nothing found"
    if "answer" in answer:
        return str(answer["answer"])
    if "embedding" in answer:
        return _numbers(answer["embedding"])
    return "\n".join(
        f"{name} {row['dtype']} {tuple(row['shape'])}: {_numbers(_flat(row['values']))}"
        for name, row in answer["outputs"].items()
    )


def _box(row: dict[str, Any]) -> str:
    x1, y1, x2, y2 = (round(value) for value in row["box"])
    return f"{row['label']} {row['score']:.3f} at {x1},{y1} to {x2},{y2}"


def _numbers(values: Sequence[Any], most: int = 6) -> str:
    told = [value if isinstance(value, str) else f"{value:.4g}" for value in values[:most]]
    return " ".join(told) + (f" ... ({len(values)} numbers)" if len(values) > most else "")


def _flat(values: Any) -> list[Any]:
    return [each for row in values for each in _flat(row)] if isinstance(values, list) else [values]


def json_line(answer: Answer) -> str:
    return json.dumps(answer, ensure_ascii=False, allow_nan=False) + "\n"


@contextmanager
def appearing(file: Path) -> Iterator[Callable[[str], None]]:
    """A function that writes to a text file, which appears complete or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    with write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = partial.open("w", encoding="utf-8")

    def write(text: str) -> None:
        with write_errors(file):
            opened.write(text)

    try:
        with opened:
            yield write
        with write_errors(file):
            partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def bar(total: int, output: Output) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; elsewhere a line now and then, with -v."""
    console = Console(stderr=True, quiet=output.quiet, highlight=False)
    if not console.is_terminal:
        done = 0

        def note(count: int) -> None:
            nonlocal done
            done += count
            if output.verbose:
                console.print(f"{done} of {total}", style="dim")

        yield note
        return
    columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.update(task, advance=count)
