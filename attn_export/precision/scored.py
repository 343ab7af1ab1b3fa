"""How exact the runtime is that a worker is about to time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from attn_export.bundle import Bundle
from attn_export.errors import RuntimeUnavailable
from attn_export.parity.compare import Comparison
from attn_export.precision import views
from attn_export.precision.speed import accuracy
from attn_export.reference import Case
from attn_export.runtimes import table
from attn_export.runtimes.base import Session
from attn_export.sessions import load
from attn_export.verifying.checking import score


def scored(
    bundle: Bundle,
    runtime: str,
    component: str,
    session: Session,
    cases: Sequence[Case],
    compared: Sequence[Comparison],
) -> dict[str, Any]:
    """{"precision", "accuracy", "broken"}: in words; `broken` names declared bounds that are not
    kept. Held-out scores are taken where a bundle has more than float32."""
    precision = views.precision_of(bundle, runtime)
    several = bundle.manifest.get("precisions", ())  # of the bundle that this is a view of
    if runtime in table.MODULE_RUNTIMES or (precision == "fp32" and not several):
        return {"precision": precision, "accuracy": "", "broken": []}
    metric = bundle.manifest.get("metric")
    found = None
    if metric:
        with ExitStack() as stack:
            others = {
                name: stack.enter_context(load(bundle, runtime, name))
                for name in bundle.components
                if name != component
            }
            try:
                found = score(bundle, {**others, component: session})
            except RuntimeUnavailable:  # the bound, if there is one, is then not kept
                found = None
    bounds = views.check_bounds(bundle, {component: session}, runtime, cases, found)
    worst = {str(i): {"cosine": row.cosine} for i, row in enumerate(compared)}
    return {
        "precision": precision,
        "accuracy": accuracy({"metric": found, "outputs": worst}, metric),
        "broken": [row.problem for row in bounds if not row.passed],
    }
