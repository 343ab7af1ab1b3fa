"""`attn-export fuse`"""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.options import (
    Output,
    lowering_option,
    output_options,
    remove_padding_option,
    requirement_options,
    right_padded_option,
)
from attn_export.requirement import Requirement


@click.command("fuse")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", "file", type=click.Path(path_type=Path), required=True,
              help="The .onnx file to write.")  # fmt: skip
@click.option("--target", default="cpu", show_default=True, help="What the file is for.")
@requirement_options
@lowering_option
@right_padded_option
@remove_padding_option
@click.option("--overwrite", is_flag=True, help="Replace a file that exists.")
@output_options
def command(
    model: Path,
    file: Path,
    target: str,
    requirement: Requirement,
    lowering: str,
    keep_work: bool,
    right_padded: tuple[str, ...],
    remove_padding: tuple[str, ...],
    overwrite: bool,
    output: Output,
) -> None:
    """Fuse the attention of MODEL, an .onnx file of any exporter, and write it where the whole
    graph still computes what it did. MODEL itself is never changed; where a check says no, nothing
    is written."""
    from attn_export.cli.tables import parity_table, print_account
    from attn_export.extras import require

    require("graph")
    from attn_export.fusing import attempt

    with output.progress() as progress:
        fused = attempt(
            model,
            file,
            target,
            lowering,
            requirement,
            overwrite,
            progress,
            right_padded,
            less_work=not keep_work,
            remove_padding=remove_padding,
        )
    console = output.console
    print_account(console, fused.account, fused.notes)
    if fused.verification:
        console.print(parity_table(fused.verification, "the given file"))
    if fused.output:
        console.print(f"Written: {fused.output}")
    output.result(fused.to_json())
    fused.require()
