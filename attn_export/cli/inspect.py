"""`attn-export inspect`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attn_export.cli.options import (
    Output,
    output_options,
    remove_padding_option,
    requirement_options,
    right_padded_option,
)
from attn_export.requirement import Requirement


@click.command("inspect")
@click.argument("model")
@click.option("--target", help="What the sites would become on: cpu, unless --runtime is given.")
@click.option("--runtime", metavar="RUNTIME",
              help="Run a bundle there: where each site went, and by which kernel.")  # fmt: skip
@click.option("--precision", help="fp32, fp16, bf16 or int8; of a bundle, the one it has.")
@right_padded_option
@remove_padding_option
@requirement_options
@output_options
def command(
    model: str,
    target: str | None,
    runtime: str | None,
    precision: str | None,
    right_padded: tuple[str, ...],
    remove_padding: tuple[str, ...],
    requirement: Requirement,
    output: Output,
) -> None:
    """List the attention sites of MODEL: a bundle, an .onnx file or a source."""
    from attn_export.cli.tables import print_account, print_placement
    from attn_export.cli.tune_tables import site_lines, tuned_line
    from attn_export.precision.names import parse_precisions

    if precision is not None:
        (precision, *_) = parse_precisions(precision)

    with output.progress() as progress:
        if runtime is None:
            accounts = _accounts(
                model, target or "cpu", precision, right_padded, remove_padding, progress
            )
        else:
            accounts = _accounts_on(model, target, runtime, progress)
    for account in accounts:
        print_account(output.console, account, account.get("notes", ()))
        if "tuned" in account:
            for line in (*site_lines(account["tuned"]["sites"]), tuned_line(account["tuned"])):
                output.console.print(line, markup=False)
        if "placement" in account:
            print_placement(output.console, account["placement"])
    for note in requirement.unused(accounts):
        output.console.print(f"Note: {note}.")
    whole = accounts[0] if len(accounts) == 1 else {"model": model, "components": accounts}
    output.result(whole)
    if failure := requirement.failure(accounts):
        raise failure


def _accounts_on(
    model: str, target: str | None, runtime: str, progress: Any
) -> list[dict[str, Any]]:
    """The sites of a bundle's graphs for a runtime, and what computed them there."""
    from attn_export.bundle import read
    from attn_export.errors import UsageError
    from attn_export.kernel_trace import by_site, trace
    from attn_export.runtimes import table

    if not Path(model).is_dir():
        raise UsageError(f"--runtime runs a bundle, and {model} is none", "leave it out, or export")
    if target is not None:
        raise UsageError("--target and --runtime are both given", "give one of them")
    bundle = read(Path(model))
    found = table.find(runtime)
    accounts = []
    for component in bundle.components:
        table.require(runtime)
        row = bundle.target_for(found.GRAPHS, component)
        progress(f"running {component} on {runtime}")
        seen, note = trace(bundle, runtime, component)
        sites = by_site(row["sites"], seen)
        placement = {"runtime": runtime, "sites": sites, "note": note}
        accounts.append({**_account(model, row), "placement": placement})
    return accounts


def _account(model: str, row: dict[str, Any]) -> dict[str, Any]:
    keys = [
        "sites", "total", "recognised", "lowered", "refused", "other", "rotary", "linear", "work",
    ]  # fmt: skip
    if row["precision"] != "fp32":
        keys += ["precision", "kept_float32", "io"]
    if row.get("tuned"):
        keys.append("tuned")
    return {"model": f"{model}/{row['file']}", **{key: row[key] for key in keys if key in row}}


def _accounts(
    model: str,
    target: str,
    precision: str | None,
    right_padded: tuple[str, ...],
    remove_padding: tuple[str, ...],
    progress: Any,
) -> list[dict[str, Any]]:
    path = Path(model)
    if path.is_dir():
        from attn_export.bundle import read
        from attn_export.errors import UsageError
        from attn_export.precision.names import rows_of, target_name

        if right_padded or remove_padding:
            given = "--right-padded" if right_padded else "--remove-padding"
            raise UsageError(
                f"{given} is for files and sources, a bundle says itself what was promised",
                "leave it out",
            )
        bundle = read(path)
        rows = rows_of(bundle.targets(), target, precision)
        if not rows:
            have = ", ".join(dict.fromkeys(row["name"] for row in bundle.targets()))
            wanted = target_name(target, precision or "fp32")
            raise UsageError(f"the bundle has no target '{wanted}'", f"its targets are {have}")
        return [_account(model, row) for row in rows]
    from attn_export.extras import require

    options = right_padded, precision or "fp32", remove_padding
    require("graph" if path.suffix == ".onnx" else "export")
    if path.suffix == ".onnx":
        from attn_export.inspection import inspect_file

        return [inspect_file(path, target, progress, *options)]
    from attn_export.inspection import inspect_source

    return inspect_source(model, target, progress, *options)
