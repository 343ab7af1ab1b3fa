"""`attn-export report`"""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.options import Output, output_options


@click.command("report")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-o", "--output", "file", type=click.Path(path_type=Path),
              help="The HTML file; report.html inside of the bundle if left out.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace a file that exists.")
@output_options
def command(bundle: Path, file: Path | None, overwrite: bool, output: Output) -> None:
    """Verify BUNDLE on its runtimes here, and write what was found as HTML."""
    from attn_export import bundle as bundles
    from attn_export.errors import UsageError
    from attn_export.extras import require
    from attn_export.storage import write_file
    from attn_export.verifying.verification import verify

    require("report")
    if file is not None and file.exists() and not overwrite:
        raise UsageError(f"{file} exists", "choose another -o, or add --overwrite")
    from attn_export.report.html import render

    found = bundles.read(bundle)
    with output.progress() as progress:
        progress("verifying")
        html = render(found.manifest, verify(found), None)
    if file is None:
        bundles.add_file(found, bundles.REPORT, html)
    else:
        write_file(file, html)
    written = file or bundle / bundles.REPORT
    output.console.print(f"Report: {written}")
    output.result({"report": str(written)})
