"""`attn-export export`"""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.options import (
    Output,
    export_options,
    output_options,
    requirement_options,
    rule_options,
    split_targets,
)
from attn_export.requirement import Requirement


@click.command("export")
@click.argument("source")
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), required=True,
              help="The bundle's folder.")  # fmt: skip
@export_options
@rule_options
@requirement_options
@output_options
def command(
    source: str,
    folder: Path,
    targets: str,
    precision: str,
    overwrite: bool,
    dynamic: tuple[str, ...],
    inputs: tuple[str, ...],
    lowering: str,
    keep_work: bool,
    right_padded: tuple[str, ...],
    compare: dict[str, str],
    masked: dict[str, str],
    metric_bounds: tuple[str, ...],
    io_dtype: str,
    requirement: Requirement,
    output: Output,
) -> None:
    """Export SOURCE (a name, package.module:factory or path/file.py:factory) into a bundle, and
    check it on the runtimes that it is for."""
    from attn_export.extras import require

    require("export")
    from attn_export.cli.outcome import report
    from attn_export.pipeline import Options, export_and_verify

    options = Options(
        targets=split_targets(targets),
        precision=precision,
        overwrite=overwrite,
        inputs=inputs,
        dynamic=dynamic,
        lowering=lowering,
        right_padded=right_padded,
        less_work=not keep_work,
        compare=compare,
        masked=masked,
        metric_bounds=metric_bounds,
        io_dtype=io_dtype,
    )
    with output.progress() as progress:
        outcome = export_and_verify(source, folder, options, progress)
    report(outcome, requirement, output)
