"""`attn-export tune`"""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.options import Output, output_options


@click.command("tune")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--runtime", "runtimes", multiple=True, metavar="RUNTIME",
              help="ort-cpu, ort-cuda, ort-tensorrt or openvino; may be repeated. By default those"
              " that the bundle has graphs for, and OpenVINO beside ort-cpu.")  # fmt: skip
@click.option("--budget", default=45.0, show_default=True, type=click.FloatRange(0.001, 86400),
              metavar="SECONDS", help="In all; what is left out is told.")  # fmt: skip
@click.option("--source", help="Start from this PyTorch model instead of the bundle's own graphs.")
@click.option("--case", help="The stored case that is timed; the first if left out.")
@click.option("--no-cache", is_flag=True, help="Keep nothing for later exports.")
@output_options
def command(
    bundle: Path,
    runtimes: tuple[str, ...],
    budget: float,
    source: str | None,
    case: str | None,
    no_cache: bool,
    output: Output,
) -> None:
    """Measure what the graphs of BUNDLE could be on this machine, and keep the fastest in it:
    lowerings of its attention, fusions, optimisation levels, threads and runtimes.

    What is timed has given PyTorch's stored answers first. The graph as it was exported is among
    what is timed, and stays unless another is faster beyond noise. BUNDLE changes in one step at
    the end, or not at all.
    """
    from attn_export.cli.tune_tables import print_tuned
    from attn_export.extras import require

    require("graph")
    if source is not None:
        require("export")
    from attn_export.tuning.tuner import tune

    with output.progress() as progress:
        result = tune(
            bundle,
            runtimes,
            budget=budget,
            source=source,
            case=case,
            cache=not no_cache,
            progress=progress,
        )
    print_tuned(output.console, result.to_json())
    output.result(result.to_json())
