"""Run a bundle's stored cases on a runtime and compare; no torch needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from attn_export import bundle as bundles
from attn_export.errors import (
    AttnExportError,
    CheckFailed,
    RuntimeUnavailable,
    UsageError,
    one_line,
)
from attn_export.localise import localise
from attn_export.parity.compare import Comparison, compare_outputs, failed
from attn_export.parity.detections import align, score_allowance
from attn_export.parity.metrics import BATCH, evaluate, read_metric
from attn_export.parity.result import RuntimeResult, Verification
from attn_export.parity.tolerance import Array, Group, rms, split
from attn_export.parity.yardstick import Progress
from attn_export.reference import Case
from attn_export.runtimes import table
from attn_export.runtimes.base import DEFAULTS, LoadOptions, Session
from attn_export.runtimes.table import available
from attn_export.sessions import STAND_IN, load, load_stand_in


def verify(
    bundle: Path | str | bundles.Bundle,
    runtimes: Sequence[str] = (),
    *,
    rtol: float | None = None,
    atol: float | None = None,
    stand_ins: bool = False,
    allow_fallback: bool = False,
    bisect: bool = True,
    progress: Progress = lambda _: None,
) -> Verification:
    """Compare each runtime's answers with the PyTorch outputs that the bundle carries.

    Args:
        runtimes: names of `attn_export.runtimes.table`; by default every runtime that the bundle
            was exported for and that works here. The others are told, with the reason.
        stand_ins: run the graphs of those others on ONNX Runtime's CPU provider, and say so.
        allow_fallback: let another provider than the one asked for run attention, and say so.
        rtol, atol: replace the stored allowance of each group by atol + rtol * rms(reference);
            both or neither.
        bisect: where a runtime is wrong, find the first value inside of the graph that is.

    Raises:
        FileError: the bundle is bad.
        UsageError: an unknown runtime, only one of the two tolerances, or one that is no bound.
        RuntimeUnavailable: a runtime that is asked for cannot work here, or none can.
    """
    found = bundle if isinstance(bundle, bundles.Bundle) else bundles.read(Path(bundle))
    if (rtol is None) != (atol is None):
        raise UsageError("only one of --rtol and --atol is given", "give both or neither")
    for option, value in (("--rtol", rtol), ("--atol", atol)):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"{option} is {value}", "give a number from 0 on")
    names, missing = list(runtimes), dict[str, RuntimeUnavailable]()
    if not names:
        names, missing = available(list(dict.fromkeys(t["runtime"] for t in found.targets())))
    if missing and not names and not stand_ins:
        raise next(iter(missing.values()))
    cases = found.cases()
    if rtol is not None and atol is not None:
        groups = found.groups()
        cases = [_overridden(case, groups[case.component], rtol, atol) for case in cases]
    options = LoadOptions(allow_fallback=allow_fallback)

    def result(name: str, stand_in: bool = False) -> RuntimeResult:
        checked = verify_runtime(found, name, cases, stand_in=stand_in, options=options)
        return with_drift(found, name, checked, cases, progress, options) if bisect else checked

    results = {name: result(name) for name in names}
    if stand_ins:
        for name in missing:
            results[f"{name} (stand-in: {STAND_IN})"] = result(name, stand_in=True)
    return Verification(
        tuple(case.name for case in cases),
        results,
        found.manifest.get("metric"),
        {name: str(error) for name, error in missing.items()},
    )


def assert_parity(bundle: Path | str | bundles.Bundle, runtimes: Sequence[str] = ()) -> None:
    """Raise CheckFailed with the first difference unless every runtime's answers are PyTorch's."""
    result = verify(bundle, runtimes)
    for name, runtime in result.runtimes.items():
        if not runtime.passed:
            raise CheckFailed(f"{name} differs from PyTorch, {runtime.failures[0]}", "see verify")


def verify_runtime(
    bundle: bundles.Bundle,
    runtime: str,
    cases: Sequence[Case],
    *,
    stand_in: bool = False,
    options: LoadOptions = DEFAULTS,
) -> RuntimeResult:
    """All cases of all components on one runtime, or of its graphs on the one that stands in."""

    def session(component: str) -> Session:
        if stand_in:
            return load_stand_in(bundle, bundle.target_for([runtime], component))
        return load(bundle, runtime, component, options=options)

    comparisons: list[tuple[str, Comparison]] = []
    placement: dict[str, int] = {}
    metric, unscored, fallbacks = None, "", list[str]()
    with ExitStack() as stack:
        sessions = {
            component: stack.enter_context(session(component)) for component in bundle.components
        }
        for component, loaded in sessions.items():
            mine = [case for case in cases if case.component == component]
            checked = list(check_session(bundle, loaded, mine))
            comparisons += checked or nothing_compared(bundle, component)
            for provider, nodes in loaded.placement().items():
                placement[provider] = placement.get(provider, 0) + nodes
            fallbacks += [loaded.fallback] if loaded.fallback else []
        if bundle.manifest.get("metric") and all(c.passed for _, c in comparisons):
            try:
                metric = score(bundle, sessions)
            except RuntimeUnavailable as error:  # the answers are right; only the score is not told
                unscored = str(error)
    ran_on = STAND_IN if stand_in else runtime
    return RuntimeResult(
        ran_on, tuple(comparisons), placement, metric, unscored, runtime if stand_in else None,
        "; ".join(fallbacks),
    )  # fmt: skip


def nothing_compared(bundle: bundles.Bundle, component: str) -> list[tuple[str, Comparison]]:
    """What is found of a component that has no case: comparing nothing fails."""
    return [
        (component, failed(output["name"], "nothing was compared"))
        for output in bundle.manifest["outputs"]
        if output["component"] == component
    ]


def check_session(
    bundle: bundles.Bundle, session: Session, cases: Sequence[Case]
) -> Iterator[tuple[str, Comparison]]:
    """Compare a session's answers on each case, and on each row of its batch alone."""
    for case in cases:
        for label, part in _parts(bundle, case):
            try:
                outputs = session.run(part.inputs)
            except Exception as error:  # the exceptions of runtimes share no base class
                problem = f"the runtime raised {_told(error)}"
                yield from ((label, failed(name, problem)) for name in part.outputs)
                continue
            yield from ((label, result) for result in judge(bundle, part, outputs))


def judge(bundle: bundles.Bundle, case: Case, outputs: dict[str, Array]) -> list[Comparison]:
    """Compare outputs with those of a case."""
    groups = bundle.groups()[case.component]
    for name, mode in bundle.compare_modes()[case.component].items():
        if mode == "detections" and name in outputs and name in case.outputs:
            edge = 2 * score_allowance(case.allowed[name], groups[name])
            outputs[name] = align(outputs[name], case.outputs[name], edge)
    return compare_outputs(outputs, case.outputs, case.allowed, case.truth, groups)


def _parts(bundle: bundles.Bundle, case: Case) -> list[tuple[str, Case]]:
    return [(case.name, case), *_rows(bundle, case)]


def with_drift(
    bundle: bundles.Bundle,
    runtime: str,
    result: RuntimeResult,
    cases: Sequence[Case],
    progress: Progress = lambda _: None,
    options: LoadOptions = DEFAULTS,
) -> RuntimeResult:
    """The result with the first value inside of the graph that is wrong, where an output is."""
    if result.passed or runtime in table.MODULE_RUNTIMES:
        return result

    def start(component: str, graph: bytes) -> Session:
        if result.stands_in_for:
            return load_stand_in(bundle, bundle.target_for([runtime], component), graph)
        return load(bundle, runtime, component, options=options, graph=graph)

    parts = {label: part for case in cases for label, part in _parts(bundle, case)}
    try:
        drift = localise(bundle, runtime, result.comparisons, parts, partial(judge, bundle), start,
                         progress)  # fmt: skip
    except AttnExportError as error:  # the verdict stands; only its place is not told
        return replace(result, undrifted=f"where it drifts first is not known: {error.observed}")
    return replace(result, drift=drift)


def _told(error: Exception) -> str:
    if isinstance(error, AttnExportError):
        return error.observed
    return f"{type(error).__name__}: {one_line(error)}"


def score(bundle: bundles.Bundle, sessions: Mapping[str, Session]) -> float:
    """The bundle's task score on the sessions of its components."""
    inputs, target = read_metric(bundle.path / bundles.METRIC)
    runs = {component: session.run for component, session in sessions.items()}
    bounds = [session.ranges.get("batch", (1, BATCH))[1] for session in sessions.values()]
    return evaluate(bundle.manifest, runs, inputs, target, min([BATCH, *bounds]))


def _rows(bundle: bundles.Bundle, case: Case) -> Iterator[tuple[str, Case]]:
    """Each row of the batch as a case of its own: no row may depend on the others."""
    if case.component in bundle.manifest.get("rows_mix", ()):
        return
    batched = {
        name
        for entry in (*bundle.manifest["inputs"], *bundle.manifest["outputs"])
        if entry["component"] == case.component and entry["shape"][:1] == ["batch"]
        for name in [entry["name"]]
    }
    if not batched >= {*case.inputs, *case.outputs}:
        return
    size = next(iter(case.inputs.values())).shape[0]
    for row in range(size if size > 1 else 0):

        def cut(arrays: Mapping[str, Array], row: int = row) -> dict[str, Array]:
            return {name: array[row : row + 1] for name, array in arrays.items()}

        yield (
            f"{case.name}, row {row} alone",
            Case(
                case.name, case.component, cut(case.inputs), cut(case.outputs), cut(case.truth),
                case.allowed,
            ),
        )  # fmt: skip


def _overridden(
    case: Case, groups: Mapping[str, Sequence[Group]], rtol: float, atol: float
) -> Case:
    allowed = {
        name: {
            group: 0.0 if part.dtype.kind in "biu" else atol + rtol * _finite_rms(part)
            for group, part in split(output, groups.get(name, ())).items()
        }
        for name, output in case.outputs.items()
    }
    return Case(case.name, case.component, case.inputs, case.outputs, case.truth, allowed)


def _finite_rms(array: Array) -> float:
    values = np.asarray(array, dtype=np.float64)
    return rms(values[np.isfinite(values)])
