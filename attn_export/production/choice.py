"""Which runtime serves a bundle, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attn_export.bundle import Bundle
from attn_export.capability.kernels import CPU, CUDA, OPENVINO, TENSORRT
from attn_export.production.measured import medians, processor

DEFAULT_ORDER = (TENSORRT, CUDA, CPU, OPENVINO)
"""Where nothing was measured: accelerators first, and of those on the CPU the one that tells which
kernel ran each node. A runtime that is not here (a browser's) is loaded by its name alone."""


@dataclass(frozen=True)
class Choice:
    """The runtime that was taken.

    Attributes:
        reason: why this one, as a clause.
        passed_over: the other runtimes of the bundle, and why each was not taken.
    """

    runtime: str
    reason: str
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        others = "".join(f"; not {name}: {why}" for name, why in self.passed_over.items())
        return f"{self.runtime}, {self.reason}{others}"


def order(bundle: Bundle, components: Sequence[str]) -> list[str]:
    """The runtimes that have a graph of every component, best first.

    Those that were measured are in the order of their medians, the one that `tune` found fastest
    before all: it knows which differences are noise. One that was not measured (no device was
    there) keeps its place in the default order, so that the CPU's figure does not rank it last.
    """
    have = [{target["runtime"] for target in bundle.targets(name)} for name in components]
    names = [name for name in DEFAULT_ORDER if all(name in runtimes for runtimes in have)]
    measured = medians(bundle, components)
    best = tuned(bundle, components)
    ranked = iter(
        sorted(
            (name for name in names if name in measured),
            key=lambda name: (name != best, measured[name]),
        )
    )
    return [next(ranked) if name in measured else name for name in names]


def tuned(bundle: Bundle, components: Sequence[str]) -> str:
    """The runtime that `tune` found fastest for all components; empty where there is none."""
    found = bundle.manifest.get("tuned")
    rows = [found.get(name) for name in components] if isinstance(found, dict) else []
    names = {str(row.get("runtime")) if isinstance(row, dict) else "" for row in rows}
    return names.pop() if len(names) == 1 else ""


def reason(bundle: Bundle, components: Sequence[str], runtime: str) -> str:
    """What speaks for a runtime where none before it in the order works."""
    names = order(bundle, components)
    if names == [runtime]:
        return "the only one that the bundle has a graph for"
    found = medians(bundle, components).get(runtime)
    if found is None:
        return f"not measured, the first that works of {', '.join(names)}"
    place = processor(bundle, runtime)
    told = f"measured at {found:.3g} ms" + (f" on {place}" if place else "")
    return told + (
        ", the fastest when it was tuned" if runtime == tuned(bundle, components) else ""
    )


def behind(bundle: Bundle, components: Sequence[str], runtime: str, taken: str) -> str:
    """Why a runtime after the one that was taken was not tried."""
    found = medians(bundle, components)
    if runtime in found and taken in found:
        return f"measured at {found[runtime]:.3g} ms"
    return f"it comes after {taken} in the default order, and one of them was not measured"
