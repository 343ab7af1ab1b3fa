"""`attn-export run`: the main job."""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.options import (
    Output,
    export_options,
    fallback_option,
    output_options,
    requirement_options,
    rule_options,
    split_targets,
)
from attn_export.requirement import Requirement


@click.command("run")
@click.argument("source")
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path),
              help="The bundle's folder; a fresh one here if left out.")  # fmt: skip
@click.option("--seconds", default=6.0, show_default=True, type=click.FloatRange(0, 86_400),
              help="Timed seconds for each runtime.")  # fmt: skip
@export_options
@rule_options
@fallback_option
@requirement_options
@output_options
def command(
    source: str,
    folder: Path | None,
    seconds: float,
    targets: str,
    precision: str,
    overwrite: bool,
    dynamic: tuple[str, ...],
    inputs: tuple[str, ...],
    lowering: str,
    keep_work: bool,
    compare: dict[str, str],
    masked: dict[str, str],
    allow_fallback: bool,
    right_padded: tuple[str, ...],
    metric_bounds: tuple[str, ...],
    io_dtype: str,
    requirement: Requirement,
    output: Output,
) -> None:
    """Export SOURCE, verify it against PyTorch, benchmark it, and write a report: the main job."""
    from attn_export.extras import require

    require("export")
    from attn_export.cli.outcome import report
    from attn_export.pipeline import Options, fresh_folder, run

    options = Options(
        targets=split_targets(targets),
        precision=precision,
        overwrite=overwrite,
        inputs=inputs,
        dynamic=dynamic,
        lowering=lowering,
        allow_fallback=allow_fallback,
        right_padded=right_padded,
        less_work=not keep_work,
        compare=compare,
        masked=masked,
        metric_bounds=metric_bounds,
        io_dtype=io_dtype,
    )
    with output.progress() as progress:
        outcome = run(source, folder or fresh_folder(source), options, seconds, progress)
    report(outcome, requirement, output)
