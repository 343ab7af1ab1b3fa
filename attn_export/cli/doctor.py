"""`attn-export doctor`"""

from __future__ import annotations

import click

from attn_export.cli.options import Output, output_options
from attn_export.errors import RuntimeUnavailable


@click.command("doctor")
@click.option("--runtime", "runtimes", multiple=True, metavar="RUNTIME",
              help="Runtime to try, which must work; may be repeated.")  # fmt: skip
@click.option("--seconds", default=180.0, show_default=True, type=click.FloatRange(1, 86_400),
              help="How long one runtime may take.")  # fmt: skip
@output_options
def command(runtimes: tuple[str, ...], seconds: float, output: Output) -> None:
    """Tell which runtimes work here, by running a small attention model on each.

    Exits 0 where ort-cpu works, or the runtimes that --runtime names; 3 where they do not.
    """
    from attn_export.cli.tables import doctor_lines, doctor_table
    from attn_export.doctor.doctor import diagnose

    with output.progress() as progress:
        result = diagnose(runtimes, seconds=seconds, progress=progress)
    output.console.print(doctor_table(result))
    for line in doctor_lines(result):
        output.console.print(line, markup=False, soft_wrap=True)
    output.result(result.to_json())
    try:
        result.require()
    except RuntimeUnavailable as error:  # the JSON object is printed already
        click.echo(f"Error: {error}", err=True)
        raise click.exceptions.Exit(error.exit_code) from error
