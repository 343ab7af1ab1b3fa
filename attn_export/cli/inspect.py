"""`attn-export inspect`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attn_export.cli.options import Output, output_options, requirement_options
from attn_export.requirement import Requirement


@click.command("inspect")
@click.argument("model")
@click.option("--target", default="cpu", show_default=True, help="What the sites would become on.")
@requirement_options
@output_options
def command(model: str, target: str, requirement: Requirement, output: Output) -> None:
    """List the attention sites of MODEL: a bundle, an .onnx file or a source."""
    from attn_export.cli.tables import print_account

    with output.progress() as progress:
        accounts = _accounts(model, target, progress)
    for account in accounts:
        print_account(output.console, account, account.get("notes", ()))
    for note in requirement.unused(accounts):
        output.console.print(f"Note: {note}.")
    whole = accounts[0] if len(accounts) == 1 else {"model": model, "components": accounts}
    output.result(whole)
    if failure := requirement.failure(accounts):
        raise failure


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
        keys = (
            "sites", "total", "recognised", "lowered", "refused", "other", "rotary", "linear",
            "work",
        )  # fmt: skip
        return [
            {"model": f"{model}/{row['file']}", **{key: row[key] for key in keys if key in row}}
            for row in rows
        ]
    from attn_export.extras import require

    require("graph" if path.suffix == ".onnx" else "export")
    if path.suffix == ".onnx":
        from attn_export.inspection import inspect_file

        return [inspect_file(path, target, progress)]
    from attn_export.inspection import inspect_source

    return inspect_source(model, target, progress)
