"""Run a bundle's stored cases on a runtime and compare; no torch needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attn_export import bundle as bundles
from attn_export.errors import RuntimeUnavailable, UsageError
from attn_export.parity import hooks
from attn_export.parity.judge import masked_allowances
from attn_export.parity.result import RuntimeResult, Verification
from attn_export.parity.rules import parse_rule
from attn_export.parity.tolerance import Array, Group, rms, split
from attn_export.parity.yardstick import Progress
from attn_export.precision import views
from attn_export.reference import Case
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import LoadOptions
from attn_export.runtimes.table import available
from attn_export.sessions import as_grown
from attn_export.verifying.against import draw_cases
from attn_export.verifying.checking import verify_runtime, with_drift
from attn_export.verifying.drawn import Drawn, Request
from attn_export.verifying.subject import declared, is_file, open_subject
from attn_export.verifying.twins import refuse_twins


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
    found = as_grown(found)
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
