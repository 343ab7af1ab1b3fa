"""Cases for `verify --against`: drawn anew, answered by a PyTorch model, a file or another bundle.

Cases are drawn as an export draws them: several batches and lengths inside of what both sides take,
masks with holes. What the two sides call differently, or do not share, is said in the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export import bundle as bundles
from attn_export.errors import UsageError
from attn_export.extras import require
from attn_export.verifying.drawn import MIXED, Drawn, Request, mixes, mixing, with_batch
from attn_export.verifying.subject import COMPONENT, declared, entries, is_file, with_rules

if TYPE_CHECKING:
    from attn_export.onnx_files.onnx_file import OnnxFile

Progress = Callable[[str], None]


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
        from attn_export.verifying.against_source import of_source

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
    from attn_export.onnx_files import cases as file_cases
    from attn_export.onnx_files import onnx_file
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


def _fixed_sizes(file: OnnxFile, inputs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Symbols of a file whose size the verified model fixes."""
    given = {entry["name"]: entry["shape"] for entry in inputs}
    return {
        str(size.value): other
        for value in file.model.graph.inputs
        for size, other in zip(value.shape or (), given.get(str(value.name), ()), strict=False)
        if not isinstance(size, int) and isinstance(other, int)
    }
