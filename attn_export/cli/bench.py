"""`attn-export bench`"""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.options import Output, output_options, runtime_options


@click.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path))
@runtime_options
@click.option("--baseline", help="Runtime that the others are divided by; torch if installed.")
@click.option("--source", help="The PyTorch model, where it moved since the export.")
@click.option("--component", help="The graph to time, where a bundle has several.")
@click.option("--seconds", default=6.0, show_default=True, type=click.FloatRange(0, 86_400),
              help="Timed seconds for each runtime.")  # fmt: skip
@output_options
def command(
    bundle: Path,
    runtimes: tuple[str, ...],
    allow_fallback: bool,
    baseline: str | None,
    source: str | None,
    component: str | None,
    seconds: float,
    output: Output,
) -> None:
    """Time the runtimes of BUNDLE, each in its own process, once their answers are PyTorch's."""
    from attn_export.bench.benchmark import benchmark, require_parity
    from attn_export.cli.tables import bench_table, noise_lines, unavailable_lines

    with output.progress() as progress:
        result = benchmark(
            bundle,
            runtimes,
            baseline=baseline,
            source=source,
            component=component,
            seconds=seconds,
            allow_fallback=allow_fallback,
            progress=progress,
        )
    output.console.print(bench_table(result))
    for line in [*noise_lines(result), *unavailable_lines(result.unavailable, "timed")]:
        output.console.print(line)
    output.result(result.to_json())
    require_parity(result)
