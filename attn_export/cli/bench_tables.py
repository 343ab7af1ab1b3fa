"""What `bench` prints, from the same objects that --json prints."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attn_export.bench.comparison import Comparison
from attn_export.bench.result import Benchmark, Timing
from attn_export.bench.stats import P99_RUNS
from attn_export.cli.plain_table import plain_table
from attn_export.cli.tables import unavailable_lines
from attn_export.precision.speed import precision_lines

COLORS = {"slower": "red", "faster": "green", "same": "default"}


def print_benchmark(console: Console, result: Benchmark) -> None:
    """A table for each batch size, and the lines that belong below."""
    for timings in result.all_timings():
        console.print(bench_table(result, timings))
    lines = [*precision_lines(result), *noise_lines(result)]
    lines += [*work_lines(result), *place_lines(result)]
    for line in [*lines, *unavailable_lines(result.unavailable, "timed")]:
        console.print(line)


def bench_table(result: Benchmark, timings: Mapping[str, Timing] | None = None) -> Table:
    """One row a runtime, at one batch size."""
    shown_timings = result.timings if timings is None else timings
    numbers = ("median ms", "95 % interval", "p90", "p99", "rows/s", "GFLOP/s", "of peak",
               "cold ms", "peak MB", "ratio", "runs")  # fmt: skip
    inputs = result.case
    if result.batches:
        batch = next(timing.batch for timing in shown_timings.values())
        inputs += f" with its rows repeated to {batch}"
    title = f"Latency of one call, {inputs}, {result.threads} threads"
    table = plain_table(title, "runtime", *numbers, right=numbers)
    for name, timing in shown_timings.items():
        row, gflops = timing.latency, timing.gflops
        rest = (f"{timing.cold_start_ms:.0f}", f"{timing.peak_rss_mb:.0f}")
        if row is None:
            nothing = ("parity failed", *[""] * 6)
            table.add_row(name, *nothing, *rest, "", "0")
            continue
        ratio = result.ratio(name, shown_timings)
        shown = "" if ratio is None else "baseline" if name == result.baseline else f"{ratio:.2g}"
        if shown and {name, result.baseline} & result.noisy.keys():
            shown += " ?"
        share = f"{gflops / timing.peak_gflops:.0%}" if gflops and timing.peak_gflops else ""
        p99 = f"{row.p99:.3f}{'' if row.p99_known else ' ?'}"
        rate = f"{1e3 * timing.batch / row.median:.4g}"
        table.add_row(
            name, f"{row.median:.3f}", f"{row.low:.3f}..{row.high:.3f}", f"{row.p90:.3f}",
            p99, rate, f"{gflops:.3g}" if gflops else "", share, *rest, shown, str(row.runs),
        )  # fmt: skip
    return table


def noise_lines(result: Benchmark) -> list[str]:
    """What makes a figure uncertain: a busy machine, a wide interval, too few calls for a p99."""
    lines = []
    if result.busy:
        load = result.machine["load_average"]
        lines.append(
            f"The load average was {load} before the first run: something else was using this"
            " machine."
        )
    lines += [
        f"The median of {name} is only known to about {half:.0%}: something else was using this"
        " machine, so do not rely on it or its ratio; run bench again."
        for name, half in result.noisy.items()
    ]
    few = [
        name
        for timings in result.all_timings()
        for name, timing in timings.items()
        if timing.latency and not timing.latency.p99_known
    ]
    if few:
        names = ", ".join(dict.fromkeys(few))
        lines.append(
            f"The p99 of {names} is little more than the slowest call: it takes {P99_RUNS} calls,"
            " give it more --seconds."
        )
    return lines


def work_lines(result: Benchmark) -> list[str]:
    """What the GFLOP/s are of, for each runtime."""
    lines = []
    for name, timing in result.timings.items():
        if timing.flops is None:
            continue
        line = f"{name}: {timing.flops / 1e9:.3g} GFLOP of matrix products a call"
        if timing.peak_gflops:
            line += f", matrix-multiply peak here {timing.peak_gflops:.3g} GFLOP/s"
        if timing.uncounted:
            kinds = ", ".join(f"{number} {op}" for op, number in timing.uncounted.items())
            line += f"; not counted, for want of sizes: {kinds}"
        lines.append(f"{line}.")
    return lines


def place_lines(result: Benchmark) -> list[str]:
    """Where the nodes of each runtime ran."""
    return [
        f"{name} ran on {', '.join(f'{p} ({n} nodes)' for p, n in timing.placement.items())}."
        for name, timing in result.timings.items()
        if timing.placement and name != "torch"
    ]


def print_comparison(console: Console, found: Comparison) -> None:
    """One row a runtime and batch size, and what else differs."""
    numbers = ("now/then", "interval")
    table = plain_table("Against the older benchmark", "runtime", "batch", "of", *numbers, "",
                        right=("batch", *numbers))  # fmt: skip
    for change in found.changes:
        interval = f"{change.low:.3f}..{change.high:.3f}"
        verdict = f"[{COLORS[change.verdict]}]{change.verdict}[/]"
        table.add_row(
            change.runtime, str(change.batch), change.of, f"{change.ratio:.3f}", interval, verdict
        )
    console.print(table)
    for note in found.notes:
        console.print(escape(f"Note: {note}."))
