"""`attn-export bench`"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_export.cli.options import Output, output_options, runtime_options
from attn_export.errors import UsageError

if TYPE_CHECKING:
    from attn_export.bundle import Bundle


@click.command("bench")
@click.argument("model", metavar="BUNDLE_OR_MODEL", type=click.Path(path_type=Path))
@runtime_options
@click.option("--baseline", help="Runtime that the others are divided by; torch if installed.")
@click.option("--source", help="The PyTorch model, where it moved since the export.")
@click.option("--component", help="The graph to time, where a bundle has several.")
@click.option("--batch", "batches", metavar="N[,N]...",
              help="Rows of a call; those of the stored case if left out.")  # fmt: skip
@click.option("--seconds", default=6.0, show_default=True, type=click.FloatRange(0, 86_400),
              help="Timed seconds for each runtime and batch, at most.")  # fmt: skip
@click.option("--save", type=click.Path(path_type=Path), help="Also write the JSON object there.")
@click.option("--overwrite", is_flag=True, help="Let --save replace a file.")
@click.option("--compare", "older", type=click.Path(path_type=Path),
              help="What --save wrote: exit 1 where a runtime is slower beyond noise.")  # fmt: skip
@click.option("--margin", default=5.0, show_default=True, type=click.FloatRange(0, 1000),
              help="Per cent that --compare lets a runtime be slower.")  # fmt: skip
@click.option("--other-machine", is_flag=True, help="Compare also with another machine's file.")
@output_options
def command(
    model: Path,
    runtimes: tuple[str, ...],
    allow_fallback: bool,
    baseline: str | None,
    source: str | None,
    component: str | None,
    batches: str | None,
    seconds: float,
    save: Path | None,
    overwrite: bool,
    older: Path | None,
    margin: float,
    other_machine: bool,
    output: Output,
) -> None:
    """Time the runtimes of a bundle, each in its own process, once their answers are PyTorch's; or
    an .onnx file, once they are those of the file with ONNX Runtime's optimisations off.

    Runtimes take turns in rounds, until each median's 95 % interval is within 2 % of it or the
    time is up. GFLOP/s are those of the matrix products of one call; their peak is what one large
    product reaches on the same runtime and threads.
    """
    from attn_export.bench import comparison
    from attn_export.bench.benchmark import benchmark
    from attn_export.bench.result import require_parity
    from attn_export.cli.bench_tables import print_benchmark, print_comparison

    sizes = _sizes(batches)
    if save is not None and save.exists() and not overwrite:
        raise UsageError(f"{save} exists", "choose another --save, or add --overwrite")
    old = _older(older, other_machine) if older is not None else None
    with output.progress() as progress, _opened(model, source, progress) as bundle:
        if model.suffix == ".onnx":
            runtimes, baseline = runtimes or ("ort-cpu",), baseline or ("torch" if source else "")
        result = benchmark(
            bundle,
            runtimes,
            baseline=baseline,
            source=source,
            component=component,
            batches=sizes,
            seconds=seconds,
            allow_fallback=allow_fallback,
            progress=progress,
        )
    shown = result.to_json()
    print_benchmark(output.console, result)
    compared = None
    if old is not None and result.passed:
        compared = comparison.compare(old, shown, margin=margin / 100, other_machine=other_machine)
        print_comparison(output.console, compared)
        shown["compare"] = compared.to_json()
    output.result(shown)
    require_parity(result)
    if save is not None:
        comparison.save(save, shown)
    if compared is not None:
        compared.require()


@contextmanager
def _opened(
    model: Path, source: str | None, progress: Callable[[str], None]
) -> Iterator[Path | Bundle]:
    if model.suffix != ".onnx":
        yield model
        return
    from attn_export.extras import require

    require("graph")
    from attn_export.bench.file_bundle import file_bundle

    with file_bundle(model, source, progress) as bundle:
        yield bundle


def _sizes(text: str | None) -> list[int]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if text is not None and (not parts or not all(p.isdecimal() and int(p) > 0 for p in parts)):
        raise UsageError(f"--batch is '{text}'", "give numbers of rows, as in --batch 1,4,8")
    return [int(part) for part in parts]


def _older(path: Path, other_machine: bool) -> dict[str, Any]:
    """The file, once it is known to be of this machine: before the long part."""
    from attn_export.bench.comparison import check_machine, read
    from attn_export.bench.machine import machine
    from attn_export.runtimes.threads import cores

    old = read(path)
    check_machine(old["machine"], machine(cores()), allowed=other_machine)
    return old
