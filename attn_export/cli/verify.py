"""`attn-export verify`"""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.options import Output, output_options, rule_options, runtime_options

OPTIONS = (
    click.option("--against", metavar="SOURCE",
                 help="Compare with this instead of the stored answers: an .onnx file, a bundle, or"
                 " a source as export takes it."),
    click.option("--seed", type=click.IntRange(0), help="What --against draws its cases with."
                 "  [default: 0]"),
    click.option("--rtol", type=float, help="Replaces the allowances, with --atol."),
    click.option("--atol", type=float, help="Replaces the allowances, with --rtol."),
    click.option("--bisect/--no-bisect", default=True, help="Where a runtime is wrong, find the"
                 " first site or node that is.  [default: bisect]"),
    click.option("--metric", "metrics", multiple=True, metavar="NAME|FUNCTION",
                 help="Also score the answers against the reference's: top1, exact, boxes or map50,"
                 " each with :OUTPUT where there are several, or module:function or"
                 " path.py:function; may be repeated."),
    click.option("--dynamic", multiple=True, metavar="INPUT=AXIS:MIN..MAX",
                 help="An axis of the PyTorch source that may vary; may be repeated."),
    click.option("--input", "inputs", multiple=True, metavar="NAME=DTYPE[SIZE,...]",
                 help="An example input of the PyTorch source; may be repeated."),
)  # fmt: skip


@click.command("verify")
@click.argument("model", type=click.Path(path_type=Path))
@runtime_options
@rule_options
@output_options
def command(
    model: Path,
    runtimes: tuple[str, ...],
    allow_fallback: bool,
    against: str | None,
    seed: int | None,
    rtol: float | None,
    atol: float | None,
    metrics: tuple[str, ...],
    dynamic: tuple[str, ...],
    inputs: tuple[str, ...],
    compare: dict[str, str],
    masked: dict[str, str],
    bisect: bool,
    output: Output,
) -> None:
    """Compare runtimes with the PyTorch outputs that MODEL, a bundle, carries, without PyTorch; or
    a bundle or an .onnx file with another source of answers (--against)."""
    from attn_export.cli.tables import (
        bound_lines,
        drift_lines,
        fallback_lines,
        parity_lines,
        parity_table,
        unavailable_lines,
    )
    from attn_export.verifying.verification import verify

    with output.progress() as progress:
        progress("verifying")
        result = verify(
            model,
            runtimes,
            against=against,
            seed=seed,
            rtol=rtol,
            atol=atol,
            compare=compare,
            mask_output=masked,
            metrics=metrics,
            inputs=inputs,
            dynamic=dynamic,
            bisect=bisect,
            allow_fallback=allow_fallback,
            progress=progress,
        )
    output.console.print(parity_table(result, detailed=output.verbose))
    if rtol is not None:
        output.console.print(f"Allowances replaced by --atol {atol} --rtol {rtol}.")
    lines = [
        *drift_lines(result),
        *parity_lines(result),
        *fallback_lines(result),
        *bound_lines(result),
        *unavailable_lines(result.unavailable, "checked"),
    ]
    for line in lines:
        output.console.print(line)
    overridden = {"rtol": rtol, "atol": atol} if rtol is not None else None
    output.result({**result.to_json(), "overridden": overridden})
    result.require()


for option in reversed(OPTIONS):
    option(command)
