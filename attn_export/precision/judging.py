"""What decides whether graphs of a precision are right: PyTorch's own run, or declared bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_export.errors import ExportError, UsageError
from attn_export.exporting.exporter import Graph
from attn_export.models.spec import ExportSpec
from attn_export.parity.tolerance import FACTOR, FLOOR, HALF_FLOOR, Group
from attn_export.precision.bounds import DROP, Bound
from attn_export.precision.names import DTYPES
from attn_export.precision.yardstick import measure
from attn_export.reference import Case

Progress = Callable[[str], None]
Groups = Mapping[str, Mapping[str, Sequence[Group]]]  # component -> output -> groups


@dataclass(frozen=True)
class Request:
    """What was asked for beside the targets."""

    lowering: str = "auto"
    bounds: Sequence[Bound] = ()
    half_io: bool = False
    less_work: bool = True
    cache_capacity: int | None = None


def declared_bounds(specs: Mapping[str, ExportSpec], given: Sequence[Bound]) -> list[Bound]:
    """The bounds that were given, or the one that the model declares for its own score.

    Raises:
        UsageError: a score that the model does not have.
    """
    metric = next((spec.metric for spec in specs.values() if spec.metric is not None), None)
    for bound in given:
        kind = bound.name.removesuffix(DROP)
        if bound.name.endswith(DROP) and (metric is None or metric.kind != kind):
            raise UsageError(
                f"the model comes with no {kind} score, so {bound.name} cannot be judged",
                "choose a bound on top1, cosine or sqnr",
            )
    if not given and metric is not None and metric.drop is not None:
        return [Bound(f"{metric.kind}{DROP}", metric.drop)]
    return list(given)


def check_use(precisions: Sequence[str], request: Request) -> None:
    """Raise UsageError for an option that no graph would be made with."""
    if request.bounds and set(precisions) == {"fp32"}:
        raise UsageError(
            "--metric-bound is given, and fp32 is judged by PyTorch's own error",
            "leave it out, or add --precision fp16 or int8",
        )
    if request.half_io and "fp16" not in precisions:
        raise UsageError("--io-dtype fp16 is given without an fp16 graph", "add --precision fp16")


def require_bounds(bounds: Sequence[Bound]) -> None:
    """Raise UsageError for an int8 graph that nothing would judge."""
    if not bounds:
        raise UsageError(
            "nothing says how far off int8 answers may be",
            "declare a bound, such as --metric-bound top1=0.99 or --metric-bound cosine=0.999",
        )


def judge_by(
    graph: Graph,
    component: str,
    precision: str,
    cases: Sequence[Case],
    groups: Mapping[str, Sequence[Group]],
    bounds: Sequence[Bound],
) -> tuple[list[Case], dict[str, Any]]:
    """What decides whether a graph of that precision is right.

    Returns the cases with their allowance for it, and the manifest's `tolerance`.

    Raises:
        UsageError, ExportError: nothing does, so that its answers would have to be guessed at.
    """
    declared = [vars(bound) for bound in bounds]
    said = " and ".join(bound.words for bound in bounds)
    reference = "PyTorch in float32"
    if precision == "fp32":
        words = f"{FACTOR:g} times PyTorch's own float32 error, at least {FLOOR:g} roundings"
        return list(cases), {"factor": FACTOR, "floor": FLOOR, "reference": reference,
                             "words": words}  # fmt: skip
    if precision == "int8":
        require_bounds(bounds)
        return list(cases), {"factor": FACTOR, "floor": FLOOR, "reference": reference,
                             "bounds": declared, "words": said}  # fmt: skip
    found = measure(graph.spec, cases, groups, precision)
    if not found.used and not bounds:
        raise ExportError(
            f"PyTorch's own {precision} run of component {component} judges nothing:"
            f" {found.why_not}",
            "declare a bound, such as --metric-bound cosine=0.999",
        )
    tolerance: dict[str, Any] = {
        "factor": FACTOR, "floor": HALF_FLOOR, "dtype": DTYPES[precision], "reference": reference,
    }  # fmt: skip
    words = said
    if found.used:
        words = f"{FACTOR:g} times the error of {found.used}, at least {HALF_FLOOR:g} roundings"
        words += f"; and {said}" if said else ""
    if found.why_not:
        tolerance["why_not"] = found.why_not
    if bounds:
        tolerance["bounds"] = declared
    return found.cases, {**tolerance, "yardstick": found.used, "words": words}


def judge_all(
    graphs: Mapping[str, Graph],
    cases: Sequence[Case],
    groups: Groups,
    precisions: Sequence[str],
    bounds: Sequence[Bound],
    progress: Progress,
) -> tuple[list[Case], dict[tuple[str, str], dict[str, Any]]]:
    """`judge_by` for each component and precision.

    Returns all cases, and the `tolerance` of each (component, precision).
    """
    judged: list[Case] = []
    tolerances: dict[tuple[str, str], dict[str, Any]] = {}
    for component, graph in graphs.items():
        mine = [case for case in cases if case.component == component]
        for precision in precisions:
            if precision in DTYPES:
                progress(f"running PyTorch on the cases of {component} in {precision}")
            mine, tolerances[component, precision] = judge_by(
                graph, component, precision, mine, groups[component], bounds
            )
        judged += mine
    return judged, tolerances
