"""Run a bundle's stored cases on a runtime and compare; no torch needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attn_export import bundle as bundles
from attn_export.errors import (
    AttnExportError,
    CheckFailed,
    RuntimeUnavailable,
    UsageError,
    one_line,
)
from attn_export.parity.compare import Comparison, compare_outputs, failed
from attn_export.parity.detections import align, score_allowance
from attn_export.parity.metrics import evaluate, read_metric
from attn_export.parity.tolerance import Array, Group, rms, split
from attn_export.reference import Case
from attn_export.runtimes import ort_cpu, torch_eager
from attn_export.runtimes.base import Session, TensorSpec

RUNTIMES = (torch_eager.NAME, ort_cpu.NAME)


@dataclass(frozen=True)
class RuntimeResult:
    """How one runtime did.

    Attributes:
        comparisons: (case, comparison) of every group of every output of every case.
        metric: the bundle's task score on this runtime; None where the bundle has none, or where
            the answers are wrong anyway.
    """

    runtime: str
    comparisons: tuple[tuple[str, Comparison], ...]
    placement: Mapping[str, int]
    metric: float | None = None
    unscored: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(c.passed for _, c in self.comparisons)

    @property
    def failures(self) -> list[str]:
        """One line for each comparison that failed."""
        if not self.comparisons:
            return ["nothing was compared"]
        return [
            f"{case}: output '{c.output}'{'' if c.group == 'all' else f' ({c.group})'}: {c.problem}"
            for case, c in self.comparisons
            if not c.passed
        ]

    def worst(self) -> dict[str, Comparison]:
        """For each output, the comparison that came closest to its allowance, or went furthest."""
        found: dict[str, Comparison] = {}
        for _, comparison in self.comparisons:
            before = found.get(comparison.output)
            if before is None or _strain(comparison) > _strain(before):
                found[comparison.output] = comparison
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "outputs": {name: _to_json(worst) for name, worst in self.worst().items()},
            "placement": dict(self.placement),
            "metric": self.metric,
            "unscored": self.unscored,
            "failures": self.failures if not self.passed else [],
        }


def _strain(comparison: Comparison) -> float:
    if not comparison.passed:
        return float("inf") if np.isnan(comparison.max_abs) else 1e9 + comparison.max_abs
    return comparison.max_abs / comparison.allowed if comparison.allowed else 0.0


def _to_json(comparison: Comparison) -> dict[str, Any]:
    keys = ("group", "max_abs", "max_rel", "mean_abs", "cosine", "error_vs_truth",
            "torch_error_vs_truth", "allowed", "mismatched", "elements", "passed")  # fmt: skip
    return {key: _finite(getattr(comparison, key)) for key in keys}


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become strings."""
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: one RuntimeResult for each runtime."""

    cases: tuple[str, ...]
    runtimes: Mapping[str, RuntimeResult]
    metric: Mapping[str, Any] | None = None

    @property
    def passed(self) -> bool:
        return bool(self.runtimes) and all(result.passed for result in self.runtimes.values())

    def to_json(self) -> dict[str, Any]:
        """The `verify --json` object."""
        return {
            "cases": list(self.cases),
            "runtimes": {name: result.to_json() for name, result in self.runtimes.items()},
            "metric": dict(self.metric) if self.metric else None,
            "passed": self.passed,
        }


def verify(
    bundle: Path | str | bundles.Bundle,
    runtimes: Sequence[str] = (),
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> Verification:
    """Compare each runtime's answers with the PyTorch outputs that the bundle carries.

    Args:
        runtimes: "ort-cpu" or "torch"; by default every runtime that the bundle was exported for.
        rtol, atol: replace the stored allowance of each group by atol + rtol * rms(reference);
            both or neither.

    Raises:
        FileError: the bundle is bad.
        UsageError: an unknown runtime, only one of the two tolerances, or one that is no bound.
        RuntimeUnavailable: a runtime cannot work here.
    """
    found = bundle if isinstance(bundle, bundles.Bundle) else bundles.read(Path(bundle))
    if (rtol is None) != (atol is None):
        raise UsageError("only one of --rtol and --atol is given", "give both or neither")
    for option, value in (("--rtol", rtol), ("--atol", atol)):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"{option} is {value}", "give a number from 0 on")
    names = list(runtimes) or list(dict.fromkeys(target["runtime"] for target in found.targets()))
    cases = found.cases()
    if rtol is not None and atol is not None:
        groups = found.groups()
        cases = [_overridden(case, groups[case.component], rtol, atol) for case in cases]
    results = {name: verify_runtime(found, name, cases) for name in names}
    return Verification(tuple(case.name for case in cases), results, found.manifest.get("metric"))


def assert_parity(bundle: Path | str | bundles.Bundle, runtimes: Sequence[str] = ()) -> None:
    """Raise CheckFailed with the first difference unless every runtime's answers are PyTorch's."""
    result = verify(bundle, runtimes)
    for name, runtime in result.runtimes.items():
        if not runtime.passed:
            raise CheckFailed(f"{name} differs from PyTorch, {runtime.failures[0]}", "see verify")


def verify_runtime(bundle: bundles.Bundle, runtime: str, cases: Sequence[Case]) -> RuntimeResult:
    """All cases of all components on one runtime."""
    comparisons: list[tuple[str, Comparison]] = []
    placement: dict[str, int] = {}
    metric, unscored = None, ""
    with ExitStack() as stack:
        sessions = {
            component: stack.enter_context(load(bundle, runtime, component))
            for component in bundle.components
        }
        for component, session in sessions.items():
            mine = [case for case in cases if case.component == component]
            checked = list(check_session(bundle, session, mine))
            comparisons += checked or _nothing(bundle, component)
            for provider, nodes in session.placement().items():
                placement[provider] = placement.get(provider, 0) + nodes
        if bundle.manifest.get("metric") and all(c.passed for _, c in comparisons):
            try:
                metric = score(bundle, sessions)
            except RuntimeUnavailable as error:  # the answers are right; only the score is not told
                unscored = str(error)
    return RuntimeResult(runtime, tuple(comparisons), placement, metric, unscored)


def _nothing(bundle: bundles.Bundle, component: str) -> list[tuple[str, Comparison]]:
    return [
        (component, failed(output["name"], "nothing was compared"))
        for output in bundle.manifest["outputs"]
        if output["component"] == component
    ]


def load(
    bundle: bundles.Bundle,
    runtime: str,
    component: str = "model",
    threads: int | None = None,
    source: str | None = None,
) -> Session:
    """A session of one component on one runtime; `source` is torch's, instead of the manifest's.

    Raises:
        UsageError: an unknown runtime, or one that the bundle was not exported for.
        RuntimeUnavailable: it cannot work here.
    """
    if runtime == ort_cpu.NAME:
        path = bundle.model_path(bundle.target_for(runtime, component))
        return ort_cpu.load(path, threads)
    if runtime == torch_eager.NAME:
        return _load_torch(bundle, component, source)
    raise UsageError(f"there is no runtime '{runtime}'", f"the runtimes are {', '.join(RUNTIMES)}")


def _load_torch(bundle: bundles.Bundle, component: str, source: str | None) -> Session:
    torch_eager.require()
    from attn_export.source import resolve

    inputs = [
        TensorSpec(entry["name"], entry["dtype"], tuple(entry["shape"]))
        for entry in bundle.manifest["inputs"]
        if entry["component"] == component
    ]
    examples = [f"{spec.name}={spec.dtype}[{_example_shape(spec)}]" for spec in inputs]
    components = resolve(source or str(bundle.manifest["source"]), examples).components
    if component not in components:
        raise UsageError(
            f"{source or bundle.manifest['source']} has no component '{component}'",
            "name the model that the bundle was exported from with --source",
        )
    spec = components[component]
    outputs = [o["name"] for o in bundle.manifest["outputs"] if o["component"] == component]
    return torch_eager.TorchSession(spec.module, inputs, outputs, spec.names)


def _example_shape(spec: TensorSpec) -> str:
    """Sizes for a factory that returns a module alone, as --input gave them for the export."""
    return ",".join(str(size) if isinstance(size, int) else "2" for size in spec.shape)


def check_session(
    bundle: bundles.Bundle, session: Session, cases: Sequence[Case]
) -> Iterator[tuple[str, Comparison]]:
    """Compare a session's answers on each case, and on each row of its batch alone."""
    for case in cases:
        groups = bundle.groups()[case.component]
        modes = bundle.compare_modes()[case.component]
        for label, part in [(case.name, case), *_rows(bundle, case)]:
            try:
                outputs = session.run(part.inputs)
            except Exception as error:  # the exceptions of runtimes share no base class
                problem = f"the runtime raised {_told(error)}"
                yield from ((label, failed(name, problem)) for name in part.outputs)
                continue
            for name, mode in modes.items():
                if mode == "detections" and name in outputs and name in part.outputs:
                    edge = 2 * score_allowance(part.allowed[name], groups[name])
                    outputs[name] = align(outputs[name], part.outputs[name], edge)
            for result in compare_outputs(outputs, part.outputs, part.allowed, part.truth, groups):
                yield label, result


def _told(error: Exception) -> str:
    if isinstance(error, AttnExportError):
        return error.observed
    return f"{type(error).__name__}: {one_line(error)}"


def score(bundle: bundles.Bundle, sessions: Mapping[str, Session]) -> float:
    """The bundle's task score on the sessions of its components."""
    inputs, target = read_metric(bundle.path / bundles.METRIC)
    runs = {component: session.run for component, session in sessions.items()}
    return evaluate(bundle.manifest, runs, inputs, target)


def _rows(bundle: bundles.Bundle, case: Case) -> Iterator[tuple[str, Case]]:
    """Each row of the batch as a case of its own: no row may depend on the others."""
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
