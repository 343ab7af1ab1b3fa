"""A stored case with more or fewer rows, for throughput over batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.bundle import Bundle
from attn_export.errors import UsageError
from attn_export.parity.tolerance import Array
from attn_export.reference import Case

BATCH = "batch"


def check_batches(bundle: Bundle, component: str, batches: Sequence[int]) -> None:
    """Raise UsageError unless the component takes these numbers of rows."""
    mine = [entry for entry in bundle.manifest["inputs"] if entry["component"] == component]
    if not any(BATCH in entry["shape"] for entry in mine):
        raise UsageError(
            f"the batch of '{component}' is fixed, so there is no other to time",
            "leave --batch out, or export with a dynamic batch",
        )
    if component in bundle.manifest.get("rows_mix", ()):
        raise UsageError(
            f"axis 0 of '{component}' is not a batch of independent rows", "leave --batch out"
        )
    for entry in mine:
        low, high = entry.get("ranges", {}).get(BATCH, (1, None))
        for batch in batches:
            if batch < low or (high is not None and batch > high):
                raise UsageError(
                    f"a batch of {batch} is outside of the declared {low}..{high}",
                    "time one inside, or export with a wider --dynamic",
                )


def with_batch(bundle: Bundle, case: Case, batch: int) -> Case:
    """The case with its rows repeated, or the first of them: row i is row i modulo its batch."""
    entries = [*bundle.manifest["inputs"], *bundle.manifest["outputs"]]
    axes = {
        entry["name"]: entry["shape"].index(BATCH)
        for entry in entries
        if entry["component"] == case.component and BATCH in entry["shape"]
    }

    def repeat(arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {
            name: np.take(array, np.arange(batch) % array.shape[axes[name]], axes[name])
            if name in axes
            else array
            for name, array in arrays.items()
        }

    name = f"{case.name}, repeated to batch={batch}"
    return Case(
        name, case.component, repeat(case.inputs), repeat(case.outputs), repeat(case.truth),
        case.allowed,
    )  # fmt: skip


def batch_of(entries: Sequence[Mapping[str, Any]], inputs: Mapping[str, Array]) -> int:
    """Rows of one call: the size called "batch", 1 where there is none."""
    for entry in entries:
        if BATCH in entry["shape"] and entry["name"] in inputs:
            return int(inputs[entry["name"]].shape[entry["shape"].index(BATCH)])
    return 1
