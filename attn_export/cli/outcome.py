"""What `export` and `run` print when they are done."""

from __future__ import annotations

from attn_export.cli import tables
from attn_export.cli.bench_tables import print_benchmark
from attn_export.cli.options import Output
from attn_export.pipeline import Outcome
from attn_export.precision.speed import judged_lines
from attn_export.requirement import Requirement


def report(outcome: Outcome, requirement: Requirement, output: Output) -> None:
    """Print the tables, and the JSON object where it was asked for.

    Raises:
        CheckFailed: a runtime's answers are not PyTorch's, or too few sites were lowered.
    """
    console = output.console
    targets = outcome.bundle.targets()
    for target in targets:
        console.print(f"[bold]Target {target['name']}[/] for {target['runtime']}: {target['file']}")
        console.print(tables.sites_table(target))
        for line in tables.other_lines(target):
            console.print(line)
    console.print(tables.parity_table(outcome.verification))
    lines = [*judged_lines(targets), *tables.bound_lines(outcome.verification)]
    lines += tables.unavailable_lines(outcome.verification.unavailable, "run")
    for line in [
        *tables.drift_lines(outcome.verification),
        *tables.parity_lines(outcome.verification),
        *lines,
    ]:
        console.print(line)
    if outcome.benchmark:
        print_benchmark(console, outcome.benchmark)
    for note in [*outcome.bundle.manifest["notes"], *requirement.unused(targets)]:
        console.print(f"Note: {note}.", markup=False)
    console.print(f"Bundle: {outcome.bundle.path}")
    output.result(outcome.to_json())
    outcome.require()
    if failure := requirement.failure(targets):
        raise failure
