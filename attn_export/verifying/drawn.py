"""What a model is verified with when cases are drawn anew, and what of them is a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from attn_export import bundle as bundles
from attn_export.errors import AttnExportError
from attn_export.parity.judge import judge
from attn_export.parity.rules import Rule
from attn_export.parity.tolerance import Array
from attn_export.reference import Case

if TYPE_CHECKING:
    from attn_export.runtimes.base import Session

MIXED = "axis 0 is no batch of independent rows, {} mixes them, so no row was run alone"


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
