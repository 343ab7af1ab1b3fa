"""What `tune` prints, and what `inspect` says of a tuned target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from attn_export.cli.plain_table import plain_table


def print_tuned(console: Console, result: Mapping[str, Any]) -> None:
    """A table for each target, and the lines that belong below."""
    for target in result["targets"]:
        print_target(console, target)
    for component, row in result["runtimes"].items():
        console.print(escape(f"Fastest for {component}: {row['runtime']}, {row['why']}."))
    for what in result["not_measured"]:
        console.print(escape(f"Not measured: {what}."))
    for note in result["notes"]:
        console.print(escape(f"Note: {note}."))
    verdict = "the bundle has new graphs" if result["changed"] else "no graph was replaced"
    console.print(f"Took {result['seconds']:.0f} s; {verdict}.")


def print_target(console: Console, target: Mapping[str, Any]) -> None:
    numbers = ("median ms", "95 % interval", "of plain", "interval", "rounds")
    title = f"{target['name']}, {target['component']}, {target['case']}"
    table = plain_table(title, "variant", "stage", *numbers, "", right=numbers)
    for row in target["variants"]:
        if row["median_ms"] is None:
            table.add_row(row["name"], row["stage"], *[""] * 5, escape(f"wrong: {row['wrong']}"))
            continue
        ratio = f"{row['ratio']:.3f}" if "ratio" in row else "plain"
        bounds = f"{row['ratio_low']:.3f}..{row['ratio_high']:.3f}" if "ratio" in row else ""
        interval = f"{row['median_low_ms']:.3f}..{row['median_high_ms']:.3f}"
        taken = "taken" if row["name"] == target["chosen"] else ""
        table.add_row(
            row["name"], row["stage"], f"{row['median_ms']:.3f}", interval, ratio, bounds,
            str(row["rounds"]), taken,
        )  # fmt: skip
    console.print(table)
    for line in site_lines(target["sites"]):
        console.print(escape(line))
    console.print(escape(tuned_line(target)))


def site_lines(sites: list[dict[str, Any]]) -> Iterator[str]:
    """What each op took for each kind of site, at each length."""
    for kind in sites:
        named = kind["sites"][0] + (
            f" and {len(kind['sites']) - 1} more" if kind["sites"][1:] else ""
        )
        for row in kind["at"]:
            ranked = sorted(row["ops"].items(), key=lambda item: item[1]["median_ms"])
            times = ", ".join(f"{op} {found['median_ms']:.3g} ms" for op, found in ranked)
            S, T = row["tokens"]
            yield f"Site {named} at {S} x {T}: {times}"
        if len(kind["buckets"]) > 1:
            ranges = ", ".join(
                f"{b['tokens'][0]} to {b['tokens'][1]} keys {b['op']}" for b in kind["buckets"]
            )
            yield f"Site {named}, best op by length: {ranges}"


def tuned_line(tuned: Mapping[str, Any]) -> str:
    """What was chosen and why, in a sentence."""
    how = f" ({tuned['how']})" if tuned["how"] and tuned["how"] != tuned["chosen"] else ""
    settings = "".join(f", {key} {value}" for key, value in tuned["settings"].items())
    return f"Tuned: {tuned['chosen']}{how}{settings}: {tuned['why']}."
