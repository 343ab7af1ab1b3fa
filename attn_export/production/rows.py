"""Which rows of separate requests may share a run, and what a component is called when served."""

from __future__ import annotations

from typing import Any

from attn_export.bundle import Bundle

BATCH = "batch"


def values(bundle: Bundle, side: str, component: str) -> list[dict[str, Any]]:
    """The manifest's inputs or outputs of one component."""
    return [entry for entry in bundle.manifest[side] if entry["component"] == component]


def max_rows(bundle: Bundle, component: str, most: int) -> int:
    """Rows that may share one run, at most `most`; 0 where requests must run as they are.

    They may where each input and output has the batch first, and no row sees another.
    """
    if component in bundle.manifest.get("rows_mix", ()):
        return 0
    inputs = values(bundle, "inputs", component)
    tensors = [*inputs, *values(bundle, "outputs", component)]
    if not inputs or any(entry["shape"][:1] != [BATCH] for entry in tensors):
        return 0
    limits = [entry.get("ranges", {}).get(BATCH) for entry in inputs]
    return min([most, *(int(limit[1]) for limit in limits if limit)])


def model_name(bundle: Bundle, component: str) -> str:
    """The bundle's name, with the component's behind it where there are several."""
    return bundle.name if len(bundle.components) == 1 else f"{bundle.name}-{component}"
