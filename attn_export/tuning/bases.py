"""The canonical graph of a bundle's component, as often as it is wanted: each time a fresh one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attn_export import bundle as bundles
from attn_export.attention.padding import declare
from attn_export.attention.unfuse import unfuse
from attn_export.capability import CONTRIB_ATTENTION
from attn_export.errors import UsageError
from attn_export.onnx_files import onnx_file
from attn_export.reference import Case
from attn_export.tuning.skip_layer_norm import split_skip_layer_norm

Sizes = list[dict[str, int]]


@dataclass(frozen=True)
class Base:
    """Where the graphs that are measured come from.

    Attributes:
        fresh: the canonical graph, and what is to be done with it when it is lowered.
        folder: where its weights lie, as far as they lie in files.
        sizes: values of the symbolic sizes, those of the timed case last.
        merged: whether its projections had been merged, and were taken apart again.
        notes: what could not be made canonical.
    """

    fresh: Callable[[], tuple[ir.Model, Callable[[], None]]]
    folder: Path
    sizes: Sizes
    merged: bool = False
    notes: list[str] = field(default_factory=list)


def from_file(bundle: bundles.Bundle, target: Mapping[str, Any], sizes: Sizes) -> Base:
    """The graph that a target has, its com.microsoft ops unfused; no PyTorch is needed."""
    path = bundle.model_path(target)
    promises = _promises(bundle, str(target["component"]))

    def fresh() -> tuple[ir.Model, Callable[[], None]]:
        file = onnx_file.read(path)
        declare(file.model, promises)
        unfuse(file.model)
        split_skip_layer_norm(file.model)
        return file.model, lambda: file.symbols.restore(file.model)

    model = onnx_file.read(path).model
    before = _projecting(model)
    kept = unfuse(model)
    after = _projecting(model)
    notes = [f"'{name}' stays as it is, its op was not taken apart" for name in kept]
    return Base(fresh, bundle.path, sizes, after < before, notes)


def _projecting(model: ir.Model) -> int:
    """How many nodes hold projections."""
    return sum(f"{n.domain}.{n.op_type}" == CONTRIB_ATTENTION for n in model.graph.all_nodes())


def from_source(bundle: bundles.Bundle, source: str, sizes: Mapping[str, Sizes]) -> dict[str, Base]:
    """component -> the graph that PyTorch exports; it must be the model that the bundle is of.

    Raises:
        UsageError: it has other components or inputs.
        ExportError: it does not export.
    """
    from attn_export.exporting.exporter import to_onnx
    from attn_export.source import eval_mode, promise, resolve, restore_mode

    if any(site.get("in_place") for target in bundle.targets() for site in target["sites"]):
        raise UsageError(
            "the bundle's caches are continued in place, which a fresh export is not",
            "leave --source out",
        )
    found = resolve(source, _examples(bundle), _dynamic(bundle))
    promise(found, {n: k for c in bundle.components for n, k in _promises(bundle, c).items()})
    bases = {}
    for component in bundle.components:
        if component not in found.components:
            raise UsageError(f"{source} has no component '{component}'", "name the bundle's source")
        spec = found.components[component]
        flags = eval_mode(spec.module)
        try:
            graph = to_onnx(spec)
        finally:
            restore_mode(flags)
        declare(graph.model, spec.promises())
        _check(bundle, component, source, graph.model)

        def fresh(model: ir.Model = graph.model) -> tuple[ir.Model, Callable[[], None]]:
            return model.clone(), lambda: None

        bases[component] = Base(fresh, bundle.path, sizes[component])
    return bases


def _check(bundle: bundles.Bundle, component: str, source: str, model: ir.Model) -> None:
    wanted = {
        str(row["name"]): len(row["shape"])
        for row in bundle.manifest["inputs"]
        if row["component"] == component
    }
    have = {str(v.name): len(v.shape or ()) for v in model.graph.inputs}
    if have != wanted:
        raise UsageError(
            f"{source} takes {', '.join(have)} and the bundle {', '.join(wanted)}",
            "name the source that the bundle was exported from, or leave --source out",
        )


def _promises(bundle: bundles.Bundle, component: str) -> dict[str, int]:
    return {
        str(row["name"]): 0 if row.get("keeps") == 0 else 1
        for row in bundle.manifest["inputs"]
        if row["component"] == component and row.get("right_padded")
    }


def _dynamic(bundle: bundles.Bundle) -> list[str]:
    """What `--dynamic` said, as the manifest tells it."""
    return [
        f"{row['name']}={axis}:{size}:{low}..{high}"
        for row in bundle.manifest["inputs"]
        for axis, size in enumerate(row["shape"])
        if (bounds := row.get("ranges", {}).get(size)) and size != "batch"
        for low, high in [bounds]
    ]


def _examples(bundle: bundles.Bundle) -> list[str]:
    """For a factory that returns a module alone, as --input gave them."""
    rows = bundle.manifest["inputs"]
    shapes = [",".join(str(s if isinstance(s, int) else 2) for s in row["shape"]) for row in rows]
    return [f"{r['name']}={r['dtype']}[{shape}]" for r, shape in zip(rows, shapes, strict=True)]


def sizes_of(bundle: bundles.Bundle, cases: Sequence[Case], timed: str) -> Sizes:
    """The symbolic sizes of each case of a component, the timed one's last.

    Args:
        cases: of one component.
    """
    ordered = [*(c for c in cases if c.name != timed), *(c for c in cases if c.name == timed)]
    found = [binding(bundle, case) for case in ordered]
    return [sizes for at, sizes in enumerate(found) if sizes not in found[at + 1 :]]


def binding(bundle: bundles.Bundle, case: Case) -> dict[str, int]:
    """What the symbolic sizes of the inputs are in a case."""
    return {
        str(size): case.inputs[row["name"]].shape[axis]
        for row in bundle.manifest["inputs"]
        if row["component"] == case.component and row["name"] in case.inputs
        for axis, size in enumerate(row["shape"])
        if isinstance(size, str)
    }
