"""Run a bundle's stored cases on a runtime and compare; no torch needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attn_export import bundle as bundles
from attn_export.against import Drawn, Request, draw_cases
from attn_export.errors import AttnExportError, RuntimeUnavailable, UsageError, one_line
from attn_export.localise import localise
from attn_export.parity import hooks, steps
from attn_export.parity.compare import Comparison, failed
from attn_export.parity.hooks import Hook, Seen
from attn_export.parity.judge import judge, masked_allowances
from attn_export.parity.metrics import BATCH, evaluate, read_metric
from attn_export.parity.result import RuntimeResult, Verification
from attn_export.parity.rules import parse_rule
from attn_export.parity.tolerance import Array, Group, rms, split
from attn_export.parity.yardstick import Progress
from attn_export.precision import views
from attn_export.reference import Case
from attn_export.runtimes import ort_cpu, table
from attn_export.runtimes.base import DEFAULTS, LoadOptions, Session
from attn_export.runtimes.table import available
from attn_export.sessions import load, load_stand_in
from attn_export.subject import declared, is_file, open_subject
from attn_export.twins import refuse_twins


def verify(
    bundle: Path | str | bundles.Bundle,
    runtimes: Sequence[str] = (),
    *,
    against: Path | str | None = None,
    seed: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    compare: Mapping[str, str] | None = None,
    mask_output: Mapping[str, str] | None = None,
    metrics: Sequence[str] = (),
    inputs: Sequence[str] = (),
    dynamic: Sequence[str] = (),
    stand_ins: bool = False,
    allow_fallback: bool = False,
    bisect: bool = True,
    progress: Progress = lambda _: None,
) -> Verification:
    """Compare each runtime's answers with the PyTorch outputs that the bundle carries.

    Args:
        runtimes: names of `attn_export.runtimes.table`; by default every runtime that the bundle
            was exported for and that works here. The others are told, with the reason. "ort-cpu" by
            default for a file.
        against: another source of answers than the bundle's own: an .onnx file, a bundle's folder,
            or a source as `attn_export.export` takes it. Its cases are drawn anew.
        seed: what they are drawn with; 0 by default.
        allow_fallback: let another provider than the one asked for run attention, and say so.
        rtol, atol: replace the stored allowance of each group by atol + rtol * rms(reference);
            both or neither.
        compare: output -> how it is compared, as attn_export.parity.rules writes it.
        mask_output: output (B, S, ...) -> input (B, S) that is 0 where its positions do not count,
            or "not:INPUT" where it is 1 there.
        metrics: scores of the answers against the reference's, as attn_export.parity.hooks has
            them: a name, or "module:function" or "path/file.py:function".
        inputs, dynamic: for a PyTorch source, as `attn_export.export` takes them.
        stand_ins: run the graphs of those others on ONNX Runtime's CPU provider, and say so.
        bisect: where a runtime is wrong, find the first value inside of the graph that is.

    Raises:
        FileError: the bundle is bad.
        UsageError: an unknown runtime, only one of the two tolerances, or one that is no bound; a
            file without `against`, or options that do not fit.
        RuntimeUnavailable: a runtime that is asked for cannot work here, or none can, or two of
            them turned out to be one.
        ExportError: the source does not run.
    """
    found = bundle if isinstance(bundle, bundles.Bundle) else open_subject(Path(bundle))
    _check_options(found, against, seed, rtol, atol, [*inputs, *dynamic])
    scores = [hooks.resolve(text) for text in metrics]
    rules = {name: parse_rule(text) for name, text in (compare or {}).items()}
    request = Request(seed or 0, rules, mask_output or {}, inputs, dynamic)
    names, missing = list(runtimes), dict[str, RuntimeUnavailable]()
    if not names and is_file(found):
        names = [ort_cpu.NAME]
    if not names:
        names, missing = available(list(dict.fromkeys(t["runtime"] for t in found.targets())))
        names = views.labels(found, names)
    if missing and not names and not stand_ins:
        raise next(iter(missing.values()))
    if against is None:
        drawn = _stored(found, request)
    else:
        drawn = draw_cases(found, str(against), request, progress)
    found, cases = drawn.bundle, drawn.cases
    options = LoadOptions(allow_fallback=allow_fallback)

    def result(name: str, stand_in: bool = False) -> RuntimeResult:
        progress(f"verifying on {name}")
        one, runtime = views.view(found, name)
        judged = views.allowances(one, runtime, cases)
        if rtol is not None and atol is not None:
            groups = found.groups()
            judged = [_overridden(case, groups[case.component], rtol, atol) for case in judged]
        checked = verify_runtime(
            one, runtime, judged, scores=scores, stand_in=stand_in, options=options
        )
        if not bisect:
            return checked
        return with_drift(one, runtime, checked, judged, progress, options, traced=against is None)

    results = {name: result(name) for name in names}
    refuse_twins(results)
    if stand_ins:
        for name in views.labels(found, list(missing)):
            seen = result(name, stand_in=True)
            results[f"{name} (stand-in: {seen.runtime})"] = seen
    return Verification(
        tuple(case.name for case in cases),
        results,
        found.manifest.get("metric"),
        {name: str(error) for name, error in missing.items()},
        reference=drawn.reference,
        against=None if against is None else str(against),
        seed=drawn.seed,
        notes=tuple(drawn.notes),
        masked=_masked(found),
    )


def _check_options(
    bundle: bundles.Bundle,
    against: Path | str | None,
    seed: int | None,
    rtol: float | None,
    atol: float | None,
    of_source: Sequence[str],
) -> None:
    if against is None and is_file(bundle):
        raise UsageError(
            f"{bundle.manifest['source']} carries no answers to compare with",
            "add --against with its PyTorch source or another .onnx file",
        )
    if against is None and seed is not None:
        raise UsageError(
            "--seed is given, and the cases are those that the bundle stores",
            "add --against with a source to draw from",
        )
    if against is None and of_source:
        raise UsageError("--input or --dynamic is given without a source", "add --against")
    if (rtol is None) != (atol is None):
        raise UsageError("only one of --rtol and --atol is given", "give both or neither")
    for option, value in (("--rtol", rtol), ("--atol", atol)):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"{option} is {value}", "give a number from 0 on")


def _stored(bundle: bundles.Bundle, request: Request) -> Drawn:
    """The bundle's own cases; what new masks leave out does not widen what is allowed elsewhere."""
    cases = bundle.cases()
    if request.compare or request.masked:
        bundle = declared(bundle, request.compare, request.masked)
        rules = bundle.rules()
        cases = [replace(c, allowed=masked_allowances(c, rules[c.component])) for c in cases]
    return Drawn(bundle, cases, "PyTorch", bundle.manifest.get("seed"))


def _masked(bundle: bundles.Bundle) -> dict[str, str]:
    rules = ((name, rule) for row in bundle.rules().values() for name, rule in row.items())
    return {name: rule.mask for name, rule in rules if rule.mask}


def assert_parity(
    bundle: Path | str | bundles.Bundle, runtimes: Sequence[str] = (), **options: Any
) -> Verification:
    """Raise CheckFailed with the worst difference unless every runtime's answers are right.

    For a project's own tests; takes what `verify` takes, and raises what it raises:

        assert_parity("model.onnx", against="my_model.py:build")

    Returns what was compared.
    """
    result = verify(bundle, runtimes, **options)
    result.require()
    return result


def verify_runtime(
    bundle: bundles.Bundle,
    runtime: str,
    cases: Sequence[Case],
    *,
    scores: Sequence[Hook] = (),
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
    scored: dict[str, float] = {}
    metric, unscored, fallbacks = None, "", list[str]()
    with ExitStack() as stack:
        sessions = {
            component: stack.enter_context(session(component)) for component in bundle.components
        }
        for component, loaded in sessions.items():
            mine = [case for case in cases if case.component == component]
            seen = [Seen(hook) for hook in scores]
            checked = list(check_session(bundle, loaded, mine, seen))
            target = views.target_of(bundle, runtime, component)
            comparisons += views.with_own_errors(target, mine, checked) or nothing_compared(
                bundle, component
            )
            scored |= {_label(bundle, component, s): s.mean() for s in seen if s.weights}
            for provider, nodes in loaded.placement().items():
                placement[provider] = placement.get(provider, 0) + nodes
            fallbacks += [loaded.fallback] if loaded.fallback else []
        walked, note = steps.check(bundle, sessions, cases)
        comparisons += walked
        if bundle.manifest.get("metric") and all(c.passed for _, c in comparisons):
            try:
                metric = score(bundle, sessions)
            except RuntimeUnavailable as error:  # the answers are right; only the score is not told
                unscored = str(error)
        finite = all(c.passed for _, c in comparisons)
        bounds = views.check_bounds(bundle, sessions, runtime, cases, metric) if finite else ()
    ran_on = views.stand_in_name(bundle, runtime) if stand_in else runtime
    return RuntimeResult(
        ran_on,
        tuple(comparisons),
        placement,
        metric,
        unscored,
        runtime if stand_in else None,
        scored,
        note,
        "; ".join(fallbacks),
        precision=views.precision_of(bundle, runtime),
        bounds=bounds,
    )


def _label(bundle: bundles.Bundle, component: str, seen: Seen) -> str:
    return seen.hook.name if len(bundle.components) == 1 else f"{seen.hook.name} of {component}"


def nothing_compared(bundle: bundles.Bundle, component: str) -> list[tuple[str, Comparison]]:
    """What is found of a component that has no case: comparing nothing fails."""
    return [
        (component, failed(output["name"], "nothing was compared"))
        for output in bundle.manifest["outputs"]
        if output["component"] == component
    ]


def check_session(
    bundle: bundles.Bundle, session: Session, cases: Sequence[Case], scores: Sequence[Seen] = ()
) -> Iterator[tuple[str, Comparison]]:
    """Compare a session's answers on each case, and on each row of its batch alone."""
    for case in cases:
        rules = bundle.rules()[case.component]
        for label, part in _parts(bundle, case):
            try:
                outputs = session.run(part.inputs)
            except Exception as error:  # the exceptions of runtimes share no base class
                problem = f"the runtime raised {_told(error)}"
                yield from ((label, failed(name, problem)) for name in part.outputs)
                continue
            for score in scores if part is case else ():
                score.add(outputs, case)
            for result in judge(outputs, part, rules):
                yield label, result


def _parts(bundle: bundles.Bundle, case: Case) -> list[tuple[str, Case]]:
    return [(case.name, case), *_rows(bundle, case)]


def with_drift(
    bundle: bundles.Bundle,
    runtime: str,
    result: RuntimeResult,
    cases: Sequence[Case],
    progress: Progress = lambda _: None,
    options: LoadOptions = DEFAULTS,
    *,
    traced: bool = True,
) -> RuntimeResult:
    """The result with the first value inside of the graph that is wrong, where an output is.

    Args:
        traced: whether the cases are the bundle's own, whose values inside it may store.
    """
    if result.passed or runtime in table.MODULE_RUNTIMES:
        return result

    def start(component: str, graph: bytes) -> Session:
        if result.stands_in_for:
            return load_stand_in(bundle, bundle.target_for([runtime], component), graph)
        return load(bundle, runtime, component, options=options, graph=graph)

    parts = {label: part for case in cases for label, part in _parts(bundle, case)}
    try:
        drift = localise(bundle, runtime, result.comparisons, parts, partial(_judged, bundle),
                         start, progress, traced=traced)  # fmt: skip
    except AttnExportError as error:  # the verdict stands; only its place is not told
        return replace(result, undrifted=f"where it drifts first is not known: {error.observed}")
    return replace(result, drift=drift)


def _judged(bundle: bundles.Bundle, case: Case, outputs: dict[str, Array]) -> list[Comparison]:
    return judge(outputs, case, bundle.rules()[case.component])


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
