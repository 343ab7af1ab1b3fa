"""Cases for `verify --against`: drawn anew, answered by a PyTorch model, a file or another bundle.

Cases are drawn as an export draws them: several batches and lengths inside of what both sides take,
masks with holes. What the two sides call differently, or do not share, is said in the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export import bundle as bundles
from attn_export.errors import AttnExportError, UsageError
from attn_export.extras import require
from attn_export.parity.judge import judge
from attn_export.parity.rules import Rule
from attn_export.parity.tolerance import Array
from attn_export.reference import Case
from attn_export.subject import COMPONENT, declared, entries, is_file, with_rules

if TYPE_CHECKING:
    from attn_export.onnx_file import OnnxFile
    from attn_export.runtimes.base import Session

Progress = Callable[[str], None]


@dataclass
class Drawn:
    """What a model is verified with.

    Attributes:
        bundle: the model, with the rules by which its outputs are compared.
        reference: whose answers the cases hold, in words.
        seed: what the cases were drawn with, where that is known.
        notes: what was left out or assumed.
    """

    bundle: bundles.Bundle
    cases: list[Case]
    reference: str
    seed: int | None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """What `verify --against` takes beside the source."""

    seed: int = 0
    compare: Mapping[str, Rule] = field(default_factory=dict)
    masked: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[str] = ()
    dynamic: Sequence[str] = ()


def draw_cases(
    bundle: bundles.Bundle, against: str, request: Request, progress: Progress = lambda _: None
) -> Drawn:
    """The cases of each component.

    Args:
        against: an .onnx file, a bundle's folder, or a source as `attn-export export` takes it.

    Raises:
        UsageError: there is no such source, or its inputs are not the model's.
        ExportError, FileError: the source does not run, or is bad.
        RuntimeUnavailable: a package that this needs is not installed.
    """
    path = Path(against)
    if path.suffix == ".onnx":
        require("graph")
        drawn = _of_file(bundle, path, request, progress)
    elif path.is_dir():
        drawn = _of_bundle(bundle, path, request)
    else:
        require("export")
        from attn_export.against_source import of_source

        drawn = of_source(bundle, against, request, progress)
    if not drawn.cases:
        raise UsageError(
            f"nothing can be compared with {against}"
            + (f" ({drawn.notes[-1]})" if drawn.notes else ""),
            "give a source whose inputs can be drawn",
        )
    return drawn


def _of_bundle(bundle: bundles.Bundle, path: Path, request: Request) -> Drawn:
    other = bundles.read(path)
    if is_file(bundle) and len(other.components) == 1:
        (component,) = other.components
        rules = other.rules()[component]
        bundle = with_rules(bundle, rules, COMPONENT)
        cases = [replace(case, component=COMPONENT) for case in other.cases()]
    elif bundle.components == other.components:
        cases = other.cases()
    else:
        have = ", ".join(other.components)
        raise UsageError(f"{path} has components {have}", "compare models of the same components")
    if other.manifest.get("rows_mix"):
        bundle = mixing(bundle, bundle.components)
    bundle = declared(bundle, request.compare, request.masked)
    return Drawn(
        bundle,
        cases,
        "PyTorch",
        other.manifest.get("seed"),
        [f"the cases are those that {path} stores"],
    )


def _of_file(bundle: bundles.Bundle, path: Path, request: Request, progress: Progress) -> Drawn:
    from attn_export import file_cases, onnx_file
    from attn_export.runtimes import ort_cpu

    if len(bundle.components) != 1:
        have = ", ".join(bundle.components)
        raise UsageError(
            f"{bundle.path} has components {have}, a file is one graph",
            "compare it with its PyTorch source",
        )
    (component,) = bundle.components
    if any(bundle.model_path(t).resolve() == path.resolve() for t in bundle.targets()):
        raise UsageError(f"{path} is the very file that is verified", "name the one it was before")
    progress(f"reading {path}")
    file = onnx_file.read(path)
    bundle = declared(bundle, request.compare, request.masked)
    progress(f"running {path.name} as it is")
    fixed = _fixed_sizes(file, entries(bundle, "inputs", component))
    found = file_cases.build(file, seed=request.seed, fixed=fixed)
    cases = [replace(case, component=component) for case in found.cases]
    if cases and is_file(bundle):
        bundle = with_batch(bundle, cases)
    with ort_cpu.load(path, optimize=False) as session:
        if cases and mixes(session, cases, bundle.rules()[component]):
            bundle = mixing(bundle, [component])
            found.notes.append(MIXED.format(path.name))
    return Drawn(bundle, cases, path.name, request.seed, [*file.notes, *found.notes])


MIXED = "axis 0 is no batch of independent rows, {} mixes them, so no row was run alone"


def _fixed_sizes(file: OnnxFile, inputs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Symbols of a file whose size the verified model fixes."""
    given = {entry["name"]: entry["shape"] for entry in inputs}
    return {
        str(size.value): other
        for value in file.model.graph.inputs
        for size, other in zip(value.shape or (), given.get(str(value.name), ()), strict=False)
        if not isinstance(size, int) and isinstance(other, int)
    }


def with_batch(bundle: bundles.Bundle, cases: Sequence[Case]) -> bundles.Bundle:
    """A file's axis 0 called "batch" where it is one: of one size in all inputs and outputs."""
    given = {entry["shape"][0] for entry in bundle.manifest["inputs"] if entry["shape"]}
    whole = all(entry["shape"] for entry in bundle.manifest["inputs"])
    sizes = [{_rows(a) for a in (*case.inputs.values(), *case.outputs.values())} for case in cases]
    one = all(len(found) == 1 and None not in found for found in sizes)
    if not (whole and one and all(isinstance(size, str) for size in given)):
        return bundle
    changed = {
        key: [{**entry, "shape": ["batch", *entry["shape"][1:]]} for entry in bundle.manifest[key]]
        for key in ("inputs", "outputs")
    }
    return replace(bundle, manifest={**bundle.manifest, **changed})


def _rows(array: Array) -> int | None:
    return array.shape[0] if array.ndim else None


def mixes(session: Session, cases: Sequence[Case], rules: Mapping[str, Rule]) -> bool:
    """Whether the reference itself answers a row of a batch otherwise than that row alone."""
    for case in cases:
        size = next((_rows(array) or 0 for array in case.inputs.values()), 0)
        if size < 2 or any(_rows(array) != size for array in case.outputs.values()):
            continue
        parts = (case.inputs, case.outputs, case.truth)
        rows = ({name: array[:1] for name, array in part.items()} for part in parts)
        inputs, outputs, truth = rows
        first = Case(case.name, case.component, inputs, outputs, truth, case.allowed)
        try:
            alone = session.run(first.inputs)
        except AttnExportError:  # it has no such size: then no batch, or a fixed one
            return True
        return any(not result.passed for result in judge(alone, first, rules))
    return False


def mixing(bundle: bundles.Bundle, components: Sequence[str]) -> bundles.Bundle:
    """The bundle with components whose rows depend on one another."""
    found = [*bundle.manifest.get("rows_mix", ()), *components]
    return replace(bundle, manifest={**bundle.manifest, "rows_mix": found})
