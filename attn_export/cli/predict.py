"""`attn-export predict`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_export.cli.options import Output, output_options

if TYPE_CHECKING:
    from attn_export.predict.job import Job

OPTIONS = (
    click.option("--text", "texts", multiple=True, metavar="TEXT",
                 help="A text, for a bundle with a tokenizer; may be repeated."),
    click.option("--runtime", default="auto", show_default=True,
                 help="The runtime, or auto for the fastest that works here."),
    click.option("--batch-size", default=8, show_default=True, type=click.IntRange(1),
                 help="The most samples that the model sees at once."),
    click.option("--workers", default=1, show_default=True, type=click.IntRange(1),
                 help="Processes (with Ray: actors), each with a session of its own."),
    click.option("--threads", type=click.IntRange(1),
                 help="Of each session; the cores here, shared by the workers, if left out."),
    click.option("--top", type=click.IntRange(1), help="How many classes to tell."),
    click.option("--threshold", type=click.FloatRange(0, 1), help="The least score of a box."),
    click.option("-o", "--output", "file", type=click.Path(path_type=Path),
                 help="Write JSON lines there, one an input; with Ray a folder of them."),
    click.option("--overwrite", is_flag=True, help="Replace results that exist."),
    click.option("--draw", "drawings", type=click.Path(path_type=Path, file_okay=False),
                 metavar="DIR", help="Draw boxes or the best classes into a PNG an image."),
    click.option("--skip-bad", is_flag=True, help="Exit 0 even where inputs were skipped."),
    click.option("--engine", type=click.Choice(["local", "ray"]), default="local",
                 show_default=True, help="ray: spread over a Ray cluster, resumable."),
    click.option("--part-size", default=256, show_default=True, type=click.IntRange(1),
                 help="Samples in each file of results; with Ray alone."),
    click.option("--address", metavar="HOST:PORT|auto",
                 help="Of a Ray cluster; one is started here if left out."),
)  # fmt: skip


@click.command("predict")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@output_options
def command(
    bundle: Path,
    inputs: tuple[str, ...],
    texts: tuple[str, ...],
    workers: int,
    file: Path | None,
    overwrite: bool,
    skip_bad: bool,
    engine: str,
    part_size: int,
    address: str | None,
    output: Output,
    **options: Any,
) -> None:
    """Run BUNDLE over INPUTs and tell what it finds, without PyTorch.

    \b
    INPUT: a file, a folder or a pattern. Images (png, jpg, bmp, webp) and texts are prepared as
    the bundle declares; .npy, .npz and .safetensors hold what the model takes; .jsonl has an object
    an input, .txt a text a line, .parquet a row an input.
    """
    from attn_export.cli import predict_output as told
    from attn_export.predict.job import prepare

    with output.progress() as progress:
        progress("reading the bundle and listing inputs")
        job: Job = prepare(bundle, inputs, texts, **options)
    if engine == "ray":
        told.on_ray(job, file, workers, part_size, address, overwrite, skip_bad, output)
    else:
        told.locally(job, file, workers, overwrite, skip_bad, output)


for option in reversed(OPTIONS):
    option(command)
