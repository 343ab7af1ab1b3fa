"""A graph whose caches have a fixed capacity, against the same graph whose caches grow."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attn_export.attention.fixed_cache import State, new_tokens
from attn_export.errors import ExportError
from attn_export.fixed_caches import LENGTH, FixedCaches
from attn_export.reference import Case
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import Arrays, Session
from attn_export.runtimes.growing import Growing
from attn_export.weights import write_graphs

FILES = ("grows.onnx", "stays.onnx")


def prove_in_place(
    before: ir.Model, after: ir.Model, caches: Sequence[State], capacity: int, cases: Sequence[Case]
) -> None:
    """Run both on the cases, on ONNX Runtime's CPU provider: they must give the same bits, whatever
    lies in the positions that are not used.

    Raises:
        ExportError: they differ, or there is nothing to compare.
    """
    if not cases:
        raise ExportError("no case has caches to compare", "give inputs that the model runs on")
    size, tokens = new_tokens(before, caches)
    counted = next(
        (
            (str(value.name), place)
            for value in before.graph.inputs
            for place, given in enumerate(value.shape or ())
            if str(given) == str(tokens)
        ),
        None,
    )
    counted = None if isinstance(tokens, int) else counted
    outputs = {given: output for output, given, _ in caches}
    fixed = FixedCaches(outputs, caches[0][2], capacity, LENGTH, size, counted)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_graphs(folder, dict(zip(FILES, (before, after), strict=True)), "weights.data")
        grows, stays = (ort_cpu.load(folder / file, optimize=False) for file in FILES)
        with grows, Growing(stays, fixed) as shared:
            for case in cases:
                expected, found = _run(grows, case), _run(shared, case)
                for output, array in expected.items():
                    if not np.array_equal(found[output], array, equal_nan=array.dtype.kind == "f"):
                        raise ExportError(
                            f"'{output}' is another where its caches are continued in place"
                            f" ({case.name})",
                            "leave --cache-capacity out for this model",
                        )


def _run(session: Session, case: Case) -> Arrays:
    dtypes = {spec.name: spec.dtype for spec in session.inputs}
    return session.run({name: array.astype(dtypes[name]) for name, array in case.inputs.items()})
