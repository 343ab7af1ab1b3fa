"""`attn-export run`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attn_export.cli.options import (
    Output,
    export_options,
    fallback_option,
    output_options,
    requirement_options,
    rule_options,
)
from attn_export.requirement import Requirement

if TYPE_CHECKING:
    from attn_export.pipeline import Options


@click.command("run")
@click.argument("source")
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path),
              help="The bundle's folder; a fresh one here if left out.")  # fmt: skip
@click.option("--seconds", default=6.0, show_default=True, type=click.FloatRange(0, 86_400),
              help="Timed seconds for each runtime.")  # fmt: skip
@rule_options
@fallback_option
@export_options
@requirement_options
@output_options
def command(
    source: str,
    folder: Path | None,
    seconds: float,
    options: Options,
    requirement: Requirement,
    output: Output,
) -> None:
    """Export SOURCE, verify it against PyTorch, benchmark it, and write a report: the main job."""
    from attn_export.cli.outcome import report
    from attn_export.pipeline import fresh_folder, run

    with output.progress() as progress:
        outcome = run(source, folder or fresh_folder(source), options, seconds, progress)
    report(outcome, requirement, output)
