"""`attn-export models`"""

from __future__ import annotations

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from attn_export.cli.options import Output, output_options
from attn_export.models.zoo import ZOO


@click.command("models")
@output_options
def command(output: Output) -> None:
    """List the models that have a name: parameters, tokens and kinds of attention."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "parameters", "tokens", "kinds", "weights", "what it is"):
        table.add_column(column, justify="right" if column == "parameters" else "left")
    for name, entry in sorted(ZOO.items()):
        weights = "trained" if entry.trained else "random"
        kinds = ", ".join(entry.kinds)
        table.add_row(name, f"{entry.parameters:,}", entry.tokens, kinds, weights, entry.summary)
    if not output.json:
        output.console.print(table)
    output.result(
        {
            "models": [
                {
                    "name": name,
                    "parameters": entry.parameters,
                    "tokens": entry.tokens,
                    "kinds": list(entry.kinds),
                    "trained": entry.trained,
                    "summary": entry.summary,
                }
                for name, entry in sorted(ZOO.items())
            ]
        }
    )
