"""`attn-export export`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attn_export.cli.options import (
    Output,
    export_options,
    output_options,
    requirement_options,
    rule_options,
)
from attn_export.requirement import Requirement

if TYPE_CHECKING:
    from attn_export.pipeline import Options


@click.command("export")
@click.argument("source")
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), required=True,
              help="The bundle's folder.")  # fmt: skip
@rule_options
@export_options
@requirement_options
@output_options
def command(
    source: str,
    folder: Path,
    options: Options,
    requirement: Requirement,
    output: Output,
) -> None:
    """Export SOURCE (a name, package.module:factory or path/file.py:factory) into a bundle, and
    check it on the runtimes that it is for."""
    from attn_export.cli.outcome import report
    from attn_export.pipeline import export_and_verify

    with output.progress() as progress:
        outcome = export_and_verify(source, folder, options, progress)
    report(outcome, requirement, output)
