"""One precision of a bundle that has several, as a bundle of its own. Needs numpy alone.

A runtime's first precision goes by the runtime's name, `ort-cpu`; the others are called
`ort-cpu-fp16` and so on, and so may the first be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attn_export.bundle import Bundle
from attn_export.errors import UsageError
from attn_export.parity.compare import Comparison
from attn_export.parity.judge import kept
from attn_export.parity.tolerance import Array, Group, allowed_error, split
from attn_export.precision.bounds import UNJUDGED, Bound, Checked, check
from attn_export.precision.names import DTYPES, split_label
from attn_export.reference import Budget, Case
from attn_export.runtimes import ort_cpu, ort_ep, table
from attn_export.runtimes.base import Session

Target = Mapping[str, Any]


def labels(bundle: Bundle, runtimes: Sequence[str]) -> list[str]:
    """The names of all precisions of some runtimes."""
    found = []
    for runtime in runtimes:
        own = _precisions(bundle, runtime)
        found += [runtime, *(f"{runtime}-{precision}" for precision in own[1:])]
    return found


def view(bundle: Bundle, label: str) -> tuple[Bundle, str]:
    """The bundle with the graphs of one precision alone, and the runtime that the label names.

    Raises:
        UsageError: the bundle has no graph of that precision for the runtime.
    """
    runtime, precision = split_label(label)
    have = _precisions(bundle, runtime)
    if precision is not None and precision not in have:
        targets = ", ".join(dict.fromkeys(str(t["name"]) for t in bundle.targets()))
        raise UsageError(
            f"the bundle has no {precision} graph for {runtime}, it has targets {targets}",
            f"export it again with --precision {precision}",
        )
    chosen = precision or (have[0] if have else None)
    if len(have) < 2 or chosen is None:
        return bundle, runtime
    owner = _owner(bundle, runtime)
    chosen_targets = [
        target
        for target in bundle.manifest["targets"]
        if target["runtime"] != owner or target["precision"] == chosen
    ]
    manifest = {**bundle.manifest, "targets": chosen_targets, "precisions": have}
    return replace(bundle, manifest=manifest), runtime


def precision_of(bundle: Bundle, runtime: str) -> str:
    """What a view's graphs for a runtime are computed in; fp32 for a runtime without any."""
    return next(iter(_precisions(bundle, runtime)), "fp32")


def _precisions(bundle: Bundle, runtime: str) -> list[str]:
    owner = _owner(bundle, runtime)
    found = (t["precision"] for t in bundle.manifest["targets"] if t["runtime"] == owner)
    return list(dict.fromkeys(map(str, found)))


def _owner(bundle: Bundle, runtime: str) -> str:
    """The runtime whose graphs a runtime runs: its own, as a rule."""
    runs_graphs = runtime in table.GRAPH_RUNTIMES or runtime.startswith(ort_ep.PREFIX)
    graphs = table.find(runtime).GRAPHS if runs_graphs else ()  # loading refuses an unknown one
    have = {target["runtime"] for target in bundle.manifest["targets"]}
    return next((name for name in graphs if name in have), runtime)


def target_of(bundle: Bundle, runtime: str, component: str) -> Target:
    """A view's target for a runtime; an empty one for a runtime without graphs, such as torch."""
    rows = bundle.targets(component)
    owner = _owner(bundle, runtime)
    return next((row for row in rows if row["runtime"] == owner), {})


def stand_in_name(bundle: Bundle, runtime: str) -> str:
    """What runs a view's graphs where their runtime is not here."""
    rows = (t for t in bundle.targets() if t["runtime"] == runtime)
    return next((str(t["stand_in"]) for t in rows if "stand_in" in t), ort_cpu.NAME)


def bounds_of(target: Target) -> list[Bound]:
    tolerance = target.get("tolerance", {})
    return [Bound(row["name"], row["value"]) for row in tolerance.get("bounds", ())]


def allowances(bundle: Bundle, runtime: str, cases: Sequence[Case]) -> list[Case]:
    """The cases with what the precision of a view allows.

    Where that is left to declared bounds, any finite answer passes here; see `check_bounds`.
    """
    groups = bundle.groups()
    return [
        _allowance(target_of(bundle, runtime, case.component), case, groups[case.component])
        for case in cases
    ]


def _has_yardstick(target: Target) -> bool:
    """Whether PyTorch's own run in its precision judges a target."""
    return bool(target.get("tolerance", {}).get("yardstick"))


def _roundings(case: Case, precision: str, groups: Mapping[str, Sequence[Group]]) -> Budget:
    """FLOOR roundings of the half dtype, where PyTorch's own error in it is not known."""
    return {
        name: {
            group: allowed_error(part, None, dtype=DTYPES[precision])
            for group, part in split(output, groups.get(name, ())).items()
        }
        for name, output in case.outputs.items()
    }


def _allowance(target: Target, case: Case, groups: Mapping[str, Sequence[Group]]) -> Case:
    precision = str(target.get("precision", "fp32"))
    if precision == "fp32":
        return case
    if precision in case.halves:
        return replace(case, allowed=case.halves[precision])
    if _has_yardstick(target):  # a case that was not stored
        return replace(case, allowed=_roundings(case, precision, groups))
    anything = float("inf")
    allowed = {name: dict.fromkeys(budget, anything) for name, budget in case.allowed.items()}
    return replace(case, allowed=allowed)


def with_own_errors(
    target: Target, cases: Sequence[Case], compared: Sequence[tuple[str, Comparison]]
) -> list[tuple[str, Comparison]]:
    """Comparisons that tell PyTorch's error in the target's precision, where it was measured."""
    precision = str(target.get("precision", "fp32"))
    own = {case.name: case.own.get(precision, {}) for case in cases}

    def told(label: str, found: Comparison) -> Comparison:
        known = own.get(label.partition(", row ")[0], {}).get(found.output, {})
        if found.group not in known:
            return found
        return replace(found, torch_error_vs_truth=known[found.group])

    return [(label, told(label, found)) for label, found in compared]


def check_bounds(
    bundle: Bundle,
    sessions: Mapping[str, Session],
    runtime: str,
    cases: Sequence[Case],
    score: float | None,
) -> tuple[Checked, ...]:
    """The declared bounds of a view's graphs, over the stored cases of all components.

    A bound that does not hold is told where nothing judges a graph.
    """
    found: dict[str, Checked] = {}
    for component, session in sessions.items():
        target = target_of(bundle, runtime, component)
        bounds = bounds_of(target)
        mine = [case for case in cases if case.component == component]
        precision = str(target.get("precision", "fp32"))
        if not bounds:
            if precision != "fp32" and not _has_yardstick(target):
                return (UNJUDGED,)
            continue
        pairs: dict[str, list[tuple[Array, Array]]] = {}
        for case in mine:
            outputs = session.run(case.inputs)
            keep = kept(case.inputs, bundle.rules()[component])
            for name, reference in case.outputs.items():
                if name in outputs and reference.dtype.kind == "f":
                    counted = keep.get(name, ...)
                    pair = outputs[name][counted], reference[counted]
                    pairs.setdefault(name, []).append(pair)
        for row in check(bounds, pairs, bundle.manifest.get("metric"), score):
            worst = found.get(row.bound.name)
            found[row.bound.name] = row if worst is None or worst.passed else worst
    return tuple(found.values())
