"""`attn-export inspect`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attn_export.cli.options import Output, output_options


@click.command("inspect")
@click.argument("model")
@click.option("--target", default="cpu", show_default=True, help="What the sites would become on.")
@output_options
def command(model: str, target: str, output: Output) -> None:
    """List the attention sites of MODEL: a bundle, an .onnx file or a source."""
    from attn_export.cli.tables import other_lines, sites_table

    with output.progress() as progress:
        accounts = _accounts(model, target, progress)
    for account in accounts:
        output.console.print(sites_table(account))
        for line in other_lines(account):
            output.console.print(line)
        passed_over = {
            s["reason"] for s in account["sites"] if s["status"] == "lowered" and s["reason"]
        }
        for reason in sorted(passed_over):
            output.console.print(f"Other ops were passed over: {reason}")
    whole = accounts[0] if len(accounts) == 1 else {"model": model, "components": accounts}
    output.result(whole)


def _accounts(model: str, target: str, progress: Any) -> list[dict[str, Any]]:
    path = Path(model)
    if path.is_dir():
        from attn_export.bundle import read
        from attn_export.errors import UsageError

        bundle = read(path)
        rows = [row for row in bundle.targets() if row["name"] == target]
        if not rows:
            have = ", ".join(dict.fromkeys(row["name"] for row in bundle.targets()))
            raise UsageError(f"the bundle has no target '{target}'", f"its targets are {have}")
        keys = ("sites", "total", "recognised", "lowered", "refused", "other")
        return [
            {"model": f"{model}/{row['file']}", **{key: row[key] for key in keys}} for row in rows
        ]
    from attn_export.extras import require

    require("graph" if path.suffix == ".onnx" else "export")
    if path.suffix == ".onnx":
        from attn_export.inspection import inspect_file

        return [inspect_file(path, target, progress)]
    from attn_export.inspection import inspect_source

    return inspect_source(model, target, progress)
