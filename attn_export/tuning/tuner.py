"""`attn_export.tune`: measure what a bundle's graphs could be, keep the fastest that is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.capability import TARGETS
from attn_export.capability.kernels import CPU, CUDA, OPENVINO, TENSORRT
from attn_export.errors import RuntimeUnavailable, UsageError
from attn_export.reference import Case
from attn_export.runtimes.packages import onnxruntime_owner
from attn_export.runtimes.table import availability
from attn_export.storage import scratch
from attn_export.tuning import bases
from attn_export.tuning.contest import Clock
from attn_export.tuning.record import publish
from attn_export.tuning.result import Tuned
from attn_export.tuning.runtime import Found, tune_runtime
from attn_export.tuning.together import compare

Progress = Callable[[str], None]
BUDGET = 45.0
TUNABLE = (CPU, CUDA, TENSORRT, OPENVINO)
ADDED = (OPENVINO,)
"""Runtimes on the CPU that a bundle for ort-cpu is tried on as well."""
OWN = 0.85  # the share of the time that targets get before the best of all are measured together
TRIED = 0.3  # the share that must be left for a runtime that nobody asked for


@dataclass(frozen=True)
class Wanted:
    """A target that is tuned; `new` where the bundle does not have it yet."""

    target: Mapping[str, Any]
    runtime: str
    new: bool = False


@dataclass
class Request:
    """What is tuned, and what is not and why."""

    wanted: list[Wanted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tune(
    bundle: Path | str | bundles.Bundle,
    runtimes: Sequence[str] = (),
    *,
    budget: float = BUDGET,
    source: str | None = None,
    case: str | None = None,
    cache: bool = True,
    progress: Progress = lambda _: None,
) -> Tuned:
    """Measure lowerings, fusions, settings and runtimes of a bundle, and keep the best in it.

    Whatever was timed gave the stored PyTorch outputs first, in the process that was timed. The
    plain export is among what is measured, and stays unless something is faster beyond noise. The
    bundle changes in one step at the end, or not at all.

    Args:
        runtimes: by default those that the bundle has graphs for and that work here, and OpenVINO
            beside ort-cpu where it is installed; it gets a graph only if it is faster.
        budget: seconds in all; what is left out for lack of time is told. One alternative is
            measured for each target in any case.
        source: the PyTorch model, to start from its export; by default the bundle's own graphs, for
            which no PyTorch is needed.
        case: the stored case that is timed; as `benchmark`, the first, where it is left out.
        cache: keep what the ops took for later exports on this machine.

    Raises:
        FileError, UsageError: a bad bundle, or an unknown runtime, case or source.
        RuntimeUnavailable: a runtime that is asked for cannot work here, or none can.
        CheckFailed: what would be kept does not give PyTorch's answers.
    """
    found = bundle if isinstance(bundle, bundles.Bundle) else bundles.read(Path(bundle))
    if budget <= 0:
        raise UsageError(f"the budget is {budget} seconds", "give more than 0")
    onnxruntime_owner()  # proofs run on it
    clock, request = Clock(budget), requested(found, runtimes)
    cases = found.cases()
    timed = {c: _timed(cases, c, case if len(found.components) == 1 else None)
             for c in found.components}  # fmt: skip
    if case is not None and len(found.components) > 1:
        raise UsageError("--case is given and the bundle has several components", "leave it out")
    sizes = {
        c: bases.sizes_of(found, [k for k in cases if k.component == c], timed[c].name)
        for c in found.components
    }
    exported = bases.from_source(found, source, sizes) if source else {}
    done: list[Found] = []
    read: dict[str, bases.Base] = {}
    notes = list(request.notes)
    with scratch(found.path.resolve()) as stage:
        for index, wanted in enumerate(request.wanted):
            component = str(wanted.target["component"])
            if wanted.new and not runtimes and clock.left < TRIED * budget:
                notes.append(f"{wanted.runtime} was not tried on {component}, no time was left")
                continue
            file = str(wanted.target["file"])
            if file not in read:
                read[file] = exported.get(component) or bases.from_file(
                    found, wanted.target, sizes[component]
                )
            base = read[file]
            notes += [note for note in base.notes if note not in notes]
            made = next((f.made for f in done if f.target["file"] == file), ())
            until = clock.spent + (OWN * clock.left) / (len(request.wanted) - index)
            done.append(
                tune_runtime(
                    found, wanted.target, wanted.runtime, base, timed[component], cases,
                    stage / f"{index}", clock, until, progress, cache=cache, new=wanted.new,
                    made=made,
                )
            )  # fmt: skip
        chosen = compare(found, done, stage, timed, clock, progress)
        result = Tuned(str(found.path), done, chosen, notes, clock.budget, clock.spent)
        result.changed = publish(found, result, runtimes, progress)
    result.seconds = clock.spent
    return result


def requested(bundle: bundles.Bundle, runtimes: Sequence[str]) -> Request:
    """The targets that can be tuned here.

    Raises:
        UsageError: a runtime that is not tuned, or that the bundle has no graph for.
        RuntimeUnavailable: one that is asked for, or every one, cannot work here.
    """
    for name in runtimes:
        if name not in TUNABLE:
            raise UsageError(f"'{name}' is not tuned", f"those that are: {', '.join(TUNABLE)}")
        availability(name).require()
    request, missing = Request(), dict[str, RuntimeUnavailable]()
    for target in bundle.targets():
        runtime = str(target["runtime"])
        if runtimes and runtime not in runtimes:
            continue
        seen = availability(runtime) if runtime in TUNABLE else None
        if seen is None:
            request.notes.append(f"target {target['name']} is not tuned, {runtime} runs elsewhere")
        elif not seen.ok:
            missing[runtime] = RuntimeUnavailable(seen.observed, seen.fix)
            request.notes.append(f"target {target['name']} is not tuned, {seen.observed}")
        elif target["precision"] != "fp32" and len(bundle.components) > 1:
            request.notes.append(
                f"target {target['name']} is not tuned: of several components fp32 alone is"
            )
        else:
            request.wanted.append(Wanted(target, runtime))
    request.wanted += _added(bundle, runtimes)
    if not request.wanted and missing:
        raise next(iter(missing.values()))
    if not request.wanted:
        have = ", ".join(sorted({str(t["runtime"]) for t in bundle.targets()}))
        raise UsageError(
            f"the bundle has nothing that could be tuned, it has graphs for {have}",
            "export it for ort-cpu, or name another --runtime",
        )
    return request


def _added(bundle: bundles.Bundle, runtimes: Sequence[str]) -> list[Wanted]:
    """Runtimes that the bundle has no graph for yet, on the machine that ort-cpu is on."""
    found = []
    for runtime in ADDED:
        wanted = runtime in runtimes if runtimes else availability(runtime).ok
        for component in bundle.components:
            rows = [t for t in bundle.targets(component) if t["precision"] == "fp32"]
            own = next((row for row in rows if row["runtime"] == CPU), None)
            if wanted and own and all(row["runtime"] != runtime for row in rows):
                name = next(t.name for t in TARGETS.values() if t.runtime == runtime)
                found.append(Wanted({**own, "name": name}, runtime, new=True))
    return found


def _timed(cases: Sequence[Case], component: str, name: str | None) -> Case:
    """The case that is timed.

    Raises:
        UsageError: there is none of that name.
    """
    own = [case for case in cases if case.component == component]
    if not own:
        raise UsageError(f"the bundle has no case for '{component}'", "export it again")
    for case in own:
        if name in (None, case.name):
            return case
    raise UsageError(f"there is no case '{name}'", f"choose {', '.join(c.name for c in own)}")
