"""Cases on the sessions of one runtime, compared; where one is wrong, the first value that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from attn_export import bundle as bundles
from attn_export.errors import AttnExportError, RuntimeUnavailable, one_line
from attn_export.parity import steps
from attn_export.parity.compare import Comparison, failed
from attn_export.parity.hooks import Hook, Seen
from attn_export.parity.judge import judge
from attn_export.parity.metrics import BATCH, evaluate, read_metric
from attn_export.parity.result import RuntimeResult
from attn_export.parity.tolerance import Array
from attn_export.parity.yardstick import Progress
from attn_export.precision import views
from attn_export.reference import Case
from attn_export.runtimes import table
from attn_export.runtimes.base import DEFAULTS, LoadOptions, Session
from attn_export.sessions import load, load_stand_in
from attn_export.verifying.localise import localise


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
