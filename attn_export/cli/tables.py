"""The tables that commands print, from the same objects that --json prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attn_export.cli.plain_table import plain_table as _table
from attn_export.doctor.doctor import Diagnosis
from attn_export.parity.hooks import BUILT_IN
from attn_export.parity.result import Verification


def sites_table(account: Mapping[str, Any]) -> Table:
    """An `inspect --json` object as a table."""
    found, lowered = account["recognised"], account["lowered"]
    title = f"Attention sites: {account['total']} counted, {found} recognised, {lowered} lowered"
    numbers = ("heads", "size", "tokens", "pairs")
    table = _table(title, "site", "kind", *numbers, "mask", "becomes", "proved", right=numbers)
    for site in account["sites"]:
        if site["kind"] is None:
            table.add_row(site["name"], "?", "", "", "", "", "", f"refused: {site['reason']}", "no")
            continue
        tokens = " x ".join(map(str, site["example_tokens"] or ("?", "?")))
        becomes = site["lowering"] or "as it was"
        if site["status"] == "refused":
            becomes += f", refused: {site['reason']}"
        pairs = f"{site['query_key_pairs']:,}" if site["query_key_pairs"] else "?"
        sizes = (str(site["heads"]), str(site["head_size"]), tokens, pairs)
        aligned = site["causal"] in ("upper-left", "lower-right")
        mask = f"{site['mask']}, causal" if aligned else site["mask"]
        table.add_row(site["name"], site["kind"], *sizes, mask, becomes, site["proved"])
    return table


def print_account(console: Console, account: Mapping[str, Any], notes: Sequence[str] = ()) -> None:
    """The table of sites with the lines that belong below it."""
    console.print(sites_table(account))
    for line in other_lines(account):
        console.print(line)
    sites = account["sites"]
    for reason in sorted({s["reason"] for s in sites if s["status"] == "lowered" and s["reason"]}):
        console.print(f"{reason[0].upper()}{reason[1:]}")
    if account.get("precision", "fp32") != "fp32":
        console.print(f"Precision: {account['precision']}")
    for row in account.get("kept_float32", ()):
        console.print(f"Kept in float32: {row['node']} ({row['op']}) {row['why']}", markup=False)
    for note in notes:
        console.print(f"Note: {note}.")


def print_placement(console: Console, placement: Mapping[str, Any]) -> None:
    """Where each site of an account ran, from `inspect --runtime --json`."""
    table = _table(f"On {placement['runtime']}", "site", "provider", "op", "ran", "kernel")
    for site in placement["sites"]:
        if site["node"] is None:
            table.add_row(site["name"], "taken apart, or not told", "", "", "")
            continue
        kernel = site["kernel"] or "the provider does not say"
        ran = "yes" if site["ran"] else "not recorded"
        table.add_row(site["name"], site["provider"], site["op"], ran, kernel)
    console.print(table)
    if placement["note"]:
        console.print(f"Note: {placement['note']}.")


def other_lines(account: Mapping[str, Any]) -> list[str]:
    """What is no softmax over keys, counted by kind, and what became an op of its own."""
    lines = []
    for kind, title in (("linear", "Linear attention"), ("rotary", "Rotary embedding")):
        found = account.get(kind, [])  # bundles of earlier versions do not say
        ops = dict.fromkeys(entry["lowering"] for entry in found if entry["lowering"])
        lowered = sum(entry["lowering"] is not None for entry in found)
        if found:
            became = f"{lowered} of {len(found)} became {' or '.join(ops)}" if ops else "left plain"
            lines.append(f"{title}: {became}")
        plain = dict.fromkeys(entry["reason"] for entry in found if not entry["lowering"])
        lines += [f"{title} left plain: {reason}" for reason in plain if reason]
    for found in account.get("work", []):
        became = "left out of the graph" if found["applied"] else f"kept: {found['reason']}"
        title = "Padding" if found["kind"].startswith("padding") else "Work that reaches no output"
        lines.append(f"{title}, {became}: {found['saves']} ({found['name']})")
    kinds = [entry.partition(":")[0] for entry in account["other"]]
    kinds = [kind for kind in kinds if kind != "linear" or "linear" not in account]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return [*lines, f"Other attention, left as it is: {counts}"] if kinds else lines


def parity_table(
    result: Verification, reference: str | None = None, *, detailed: bool = False
) -> Table:
    """One row for each output of each runtime: its worst case. Details are columns of their own."""
    reference = reference or result.reference
    numbers = ["max error", "of allowed", "vs truth", f"{reference}'s own"]
    numbers += ["mean error", "SQNR dB", "smallest --rtol"] if detailed else []
    title = f"Parity with {reference}: {len(result.cases)} cases ({', '.join(result.cases)})"
    table = _table(title, "runtime", "output", *numbers, "cosine", "", right=numbers)
    for name, runtime in result.runtimes.items():
        for output, worst in runtime.worst().items():
            label = output if worst.group == "all" else f"{output} ({worst.group})"
            share = f"{worst.max_abs / worst.allowed:.0%}" if worst.allowed else "exact"
            share = "see bounds" if worst.allowed == float("inf") else share
            passed, problem = "[green]passed[/]", f"[red]FAILED[/] {escape(worst.problem)}"
            details = [
                f"{worst.mean_abs:.2e}", f"{worst.sqnr_db:.1f}", f"{worst.smallest_rtol:.2e}",
            ]  # fmt: skip
            table.add_row(
                name, label, f"{worst.max_abs:.2e}", share, _figure(worst.error_vs_truth),
                _figure(worst.torch_error_vs_truth), *(details if detailed else ()),
                f"{worst.cosine:.8f}", passed if worst.passed else problem,
            )  # fmt: skip
    return table


def parity_lines(result: Verification) -> list[str]:
    """What belongs below the table: seed, masks, scores and what was left out."""
    lines = []
    if result.seed is not None:
        drawn = "Cases drawn anew" if result.against else "Stored cases, drawn"
        lines.append(f"{drawn} with seed {result.seed}.")
    for output, mask in result.masked.items():
        name, value = mask.removeprefix("not:"), 1 if mask.startswith("not:") else 0
        lines.append(f"Positions of '{output}' where '{name}' is {value} were left out.")
    for name, runtime in result.runtimes.items():
        if runtime.scores:
            shown = ", ".join(_scored(score, value) for score, value in runtime.scores.items())
            lines.append(f"Agreement of {name} with {result.reference}: {shown}")
    notes = [*result.notes, *(runtime.note for runtime in result.runtimes.values())]
    lines += [f"Note: {note}." for note in dict.fromkeys(notes) if note]
    return [escape(line) for line in [*metric_lines(result), *lines]]


def _scored(name: str, value: float) -> str:
    """A share in percent; what a user's own function returns as it is."""
    share = name.partition(":")[0].partition(" of ")[0] in BUILT_IN
    return f"{name} {value:.2%}" if share else f"{name} {value:.6g}"


def fallback_lines(result: Verification) -> list[str]:
    """A sentence for each runtime that let another provider run attention."""
    return [
        f"{name} passed some of its attention on: {runtime.fallback}."
        for name, runtime in result.runtimes.items()
        if runtime.fallback
    ]


def drift_lines(result: Verification) -> list[str]:
    """Where each runtime that is wrong goes wrong first, safe from markup."""
    lines = []
    for name, runtime in result.runtimes.items():
        told = runtime.drift.lines() if runtime.drift else []
        told += [f"{runtime.undrifted}."] if runtime.undrifted else []
        lines += [escape(f"{name}: {line}") for line in told]
    return lines


def bound_lines(result: Verification) -> list[str]:
    """The declared bounds of each runtime, with what was found."""
    return [
        f"{name}: {row.bound.words}, found {row.found:.6g}, {'kept' if row.passed else 'NOT KEPT'}"
        for name, runtime in result.runtimes.items()
        for row in runtime.bounds
    ]


def unavailable_lines(reasons: Mapping[str, str], left_out: str) -> list[str]:
    """A sentence for each runtime of the bundle that cannot work here, safe from markup."""
    return [
        escape(f"{name} was not {left_out}, it is not available: {why}")
        for name, why in reasons.items()
    ]


def _figure(value: float | None) -> str:
    return "no truth" if value is None else f"{value:.2e}"


METRIC_NAMES = {"top1": "Accuracy", "map50": "mAP@0.5", "exact-match": "Exact match"}


def metric_lines(result: Verification) -> list[str]:
    """Held-out score of PyTorch and of each runtime, in words."""
    metric = result.metric
    if metric is None:
        return []
    name, reference = METRIC_NAMES.get(metric["kind"], metric["kind"]), metric["reference"]
    lines = [f"{name} on {metric['samples']} held-out samples: PyTorch {reference:.2%}"]
    for runtime, found in result.runtimes.items():
        if found.metric is not None:
            same = "the same" if found.metric == reference else f"{found.metric - reference:+.2%}"
            lines[0] += f", {runtime} {found.metric:.2%} ({same})"
        if found.unscored:
            lines.append(f"{runtime} was not scored: {found.unscored}")
    return lines


def doctor_table(result: Diagnosis) -> Table:
    """One row for each runtime."""
    verdicts = {"pass": "[green]PASS[/]", "fail": "[red]FAIL[/]", "unavailable": "not available"}
    table = _table("Runtimes of this machine", "runtime", "", "ms", "versions", "device", "driver",
                   right=("ms",))  # fmt: skip
    for found in result.findings:
        versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
        took = "" if found.ms is None else f"{found.ms:.0f}"
        table.add_row(
            found.runtime, verdicts[found.status], took, versions, found.device, found.driver
        )
    return table


def doctor_lines(result: Diagnosis) -> list[str]:
    """What was seen of each runtime that did not pass, and of the libraries of all."""
    lines = []
    for found in result.findings:
        if found.status != "pass":
            lines.append(f"{found.runtime}: {found.observed}; {found.fix}.")
        here = [f"{name} ({path})" for name, path in found.libraries.items() if path]
        if here:
            lines.append(f"{found.runtime} libraries found: {', '.join(here)}")
        if found.missing:
            lines.append(f"{found.runtime} libraries missing: {', '.join(found.missing)}")
    return lines
