"""Options that several commands share, and where their output goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeVar, cast

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LOG_WIDTH = 132
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Output:
    """Where a command prints: JSON alone on stdout, or tables there; progress always on stderr."""

    json: bool
    quiet: bool
    verbose: bool

    @property
    def console(self) -> Console:
        """For tables and sentences; wide where it is a pipe or a log."""
        console = Console(stderr=self.json, quiet=self.quiet, highlight=False)
        if not console.is_terminal:
            console.width = LOG_WIDTH
        return console

    def result(self, value: dict[str, Any]) -> None:
        """Print the command's JSON object, where JSON was asked for."""
        if self.json:
            click.echo(json.dumps(value, indent=2, ensure_ascii=False), file=sys.__stdout__)

    @contextmanager
    def progress(self) -> Iterator[Callable[[str], None]]:
        """A function that says what is being done; silent with -q, plain lines off a terminal."""
        console = Console(stderr=True, quiet=self.quiet, highlight=False)
        if not console.is_terminal:
            yield (
                (lambda text: console.print(text, style="dim"))
                if self.verbose
                else (lambda _: None)
            )
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda text: bar.update(task, description=text)


def output_options(command: Command) -> Command:
    """Add --json, -q and -v, handed to the command as one `output`."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON alone on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
    @click.option("-v", "--verbose", is_flag=True, help="Print each step.")
    @wraps(command)
    def wrapped(*args: Any, as_json: bool, quiet: bool, verbose: bool, **kwargs: Any) -> Any:
        # With --json, what a user's model prints must not come between.
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            return command(*args, output=Output(as_json, quiet, verbose), **kwargs)

    return cast(Command, wrapped)


def export_options(command: Command) -> Command:
    """Add the options of everything that exports, handed to the command as one `options`.

    What other decorators above this one hand over counts too, where `Options` has its name.
    """

    @wraps(command)
    def wrapped(*args: Any, targets: str, keep_work: bool, **kwargs: Any) -> Any:
        from attn_export.extras import require

        require("export")
        from attn_export.pipeline import Options

        own = {field.name for field in fields(Options)} & kwargs.keys()
        given = {name: kwargs.pop(name) for name in own}
        options = Options(targets=split_targets(targets), less_work=not keep_work, **given)
        return command(*args, options=options, **kwargs)

    wrapped_command = cast(Command, wrapped)
    options = (
        click.option("--target", "targets", default="cpu", show_default=True, metavar="T[,T]...",
                     help="What to make graphs for: cpu, cuda, tensorrt, openvino, web."),
        click.option("--precision", default="fp32", show_default=True, metavar="P[,P]...",
                     help="fp32, fp16, bf16, int8: each target gets a graph in each."),
        click.option("--metric-bound", "metric_bounds", multiple=True, metavar="NAME=VALUE",
                     help="How much worse int8, or what PyTorch cannot judge, may be: top1, cosine"
                     " or sqnr at least, top1-drop, map50-drop or exact-match-drop at most."),
        click.option("--io-dtype", type=click.Choice(["fp32", "fp16"]), default="fp32",
                     show_default=True, help="Inputs and outputs of fp16 graphs; caches are fp16."),
        click.option("--overwrite", is_flag=True, help="Replace a bundle that exists."),
        click.option("--dynamic", multiple=True, metavar="INPUT=AXIS:MIN..MAX",
                     help="An axis whose size may differ from call to call."),
        click.option("--input", "inputs", multiple=True, metavar="NAME=DTYPE[SIZE,...]",
                     help="An example input, for a factory that returns none."),
        click.option("--cache-capacity", type=click.IntRange(min=2), metavar="N",
                     help="Keep caches in buffers of up to N positions that past and present share:"
                     " no step copies them. For targets cpu and cuda."),
        lowering_option,
        right_padded_option,
        remove_padding_option,
    )  # fmt: skip
    for option in reversed(options):
        wrapped_command = option(wrapped_command)
    return wrapped_command


def rule_options(command: Command) -> Command:
    """Add --compare and --mask-output, handed to the command as `compare` and `masked`."""

    @click.option(
        "--compare",
        "compared",
        multiple=True,
        metavar="OUTPUT=RULE",
        help="How an output is compared: elementwise, index:SCORES[:AXIS], sorted:SCORES or"
        " detections; may be repeated.",
    )
    @click.option(
        "--mask-output",
        "masks",
        multiple=True,
        metavar="OUTPUT=INPUT",
        help="Leave out positions of OUTPUT (B, S, ...) where INPUT (B, S) is 0, or with not:INPUT"
        " where it is 1; may be repeated.",
    )
    @wraps(command)
    def wrapped(
        *args: Any, compared: tuple[str, ...], masks: tuple[str, ...], **kwargs: Any
    ) -> Any:
        from attn_export.parity.rules import parse_pairs, parse_rule

        compare = parse_pairs("--compare", compared, "--compare label=index:logits")
        for rule in compare.values():
            parse_rule(rule)
        masked = parse_pairs("--mask-output", masks, "--mask-output tokens=attention_mask")
        return command(*args, compare=compare, masked=masked, **kwargs)

    return cast(Command, wrapped)


def requirement_options(command: Command) -> Command:
    """Add --require and --excuse, handed to the command as one `requirement`."""

    @click.option(
        "--require",
        "wanted",
        metavar="all|N",
        help="Exit 1 unless all sites are lowered or excused, or at least N lowered.",
    )
    @click.option(
        "--excuse",
        "excused",
        multiple=True,
        metavar="SITE_OR_REASON",
        help="A site, or a reason's code, that --require all lets go; may be repeated.",
    )
    @click.option(
        "--allow-blocked-rows",
        is_flag=True,
        help="Let a query that may see no key get another answer than before.",
    )
    @wraps(command)
    def wrapped(
        *args: Any,
        wanted: str | None,
        excused: tuple[str, ...],
        allow_blocked_rows: bool,
        **kwargs: Any,
    ) -> Any:
        from attn_export.requirement import parse

        return command(*args, requirement=parse(wanted, excused, allow_blocked_rows), **kwargs)

    return cast(Command, wrapped)  # fmt: skip


def lowering_option(command: Command) -> Command:
    """Add --lowering and --keep-work."""
    choice = click.Choice(["auto", "contrib", "standard", "decomposed"])
    command = click.option("--keep-work", is_flag=True,
                           help="Compute also what reaches no output.")(command)  # fmt: skip
    return click.option("--lowering", default="auto", show_default=True, type=choice,
                        help="What attention becomes.")(command)  # fmt: skip


def runtime_options(command: Command) -> Command:
    """Add --runtime and --allow-fallback."""
    options = (
        click.option("--runtime", "runtimes", multiple=True, metavar="RUNTIME",
                     help="torch, torch-compile, ort-cpu, ort-cuda, ort-tensorrt, openvino,"
                     " ort-web, onnx-reference or ort-ep:NAME; may be repeated. `doctor` says"
                     " which work."),
        fallback_option,
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def fallback_option(command: Command) -> Command:
    """Add --allow-fallback."""
    return click.option(
        "--allow-fallback",
        is_flag=True,
        help="Let another execution provider than the one asked for run attention.",
    )(command)


def right_padded_option(command: Command) -> Command:
    """Add --right-padded, which may be repeated."""
    return click.option(
        "--right-padded", multiple=True, metavar="INPUT[=0]",
        help="A mask (B, T) whose rows are one or more ones, then zeros, as you promise: ops get"
        " lengths in its place. =0 where 0 keeps a key. May be repeated.",
    )(command)  # fmt: skip


def remove_padding_option(command: Command) -> Command:
    """Add --remove-padding, which may be repeated."""
    return click.option(
        "--remove-padding", multiple=True, metavar="INPUT[=0]",
        help="A mask (B, S) as for --right-padded, whose padding does not count: it is not"
        " computed, and outputs (B, S, ...) are not compared there. One for each component.",
    )(command)  # fmt: skip


def split_targets(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
