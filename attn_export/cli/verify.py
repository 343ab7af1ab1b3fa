"""`attn-export verify`"""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.options import Output, output_options, runtime_options


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@runtime_options
@click.option("--rtol", type=float, help="Replaces the stored allowances, with --atol.")
@click.option("--atol", type=float, help="Replaces the stored allowances, with --rtol.")
@click.option(
    "--bisect/--no-bisect",
    default=True,
    help="Where a runtime is wrong, find the first site or node that is.  [default: bisect]",
)
@output_options
def command(
    bundle: Path,
    runtimes: tuple[str, ...],
    allow_fallback: bool,
    rtol: float | None,
    atol: float | None,
    bisect: bool,
    output: Output,
) -> None:
    """Compare runtimes with the PyTorch outputs that BUNDLE carries, without PyTorch."""
    from attn_export.cli.tables import (
        drift_lines,
        fallback_lines,
        metric_lines,
        parity_table,
        unavailable_lines,
    )
    from attn_export.errors import CheckFailed
    from attn_export.verification import verify

    with output.progress() as progress:
        progress("verifying")
        result = verify(
            bundle,
            runtimes,
            rtol=rtol,
            atol=atol,
            bisect=bisect,
            allow_fallback=allow_fallback,
            progress=progress,
        )
    output.console.print(parity_table(result))
    if rtol is not None:
        output.console.print(f"Allowances replaced by --atol {atol} --rtol {rtol}.")
    for line in [
        *drift_lines(result),
        *metric_lines(result),
        *fallback_lines(result),
        *unavailable_lines(result.unavailable, "checked"),
    ]:
        output.console.print(line)
    overridden = {"rtol": rtol, "atol": atol} if rtol is not None else None
    output.result({**result.to_json(), "overridden": overridden})
    for name, runtime in result.runtimes.items():
        if not runtime.passed:
            raise CheckFailed(
                f"{name} differs from PyTorch, {runtime.failures[0]}", "do not deploy this bundle"
            )
