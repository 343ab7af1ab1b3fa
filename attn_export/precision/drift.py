"""Find the node at which a half graph leaves the float32 one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attn_export.parity.tolerance import Array, epsilon
from attn_export.precision.magnitudes import inner_values, look_inside

VISIBLE = 8.0  # roundings; less is what any step adds


@dataclass(frozen=True)
class Drift:
    """A node and what was seen of its result."""

    node: str
    code: str
    why: str


def find_drift(
    single: ir.Model,
    half: ir.Model,
    runs: Sequence[Mapping[str, Array]],
    dtype: ir.DataType,
    apart: Collection[str],
    kept: Collection[str],
) -> list[Drift]:
    """The first node whose half result is not finite; else the one that magnifies errors most.

    Where that node is float32 already, its inputs carry the error, and what makes them is named.

    Args:
        half: the half graph, or the stand-in that rounds as it does, with float32 inputs.
        apart: values that differ by design, as cut masks do.
        kept: names of the nodes that are float32.
    """
    errors = _errors(single, half, runs, apart)
    eps = epsilon(dtype.numpy())
    worst: tuple[float, ir.Node] | None = None
    for node in single.graph:
        made = max((errors.get(str(v.name), 0.0) for v in node.outputs), default=0.0)
        given = max((errors.get(str(v.name), 0.0) for v in node.inputs if v is not None), default=0)
        if made == float("inf"):
            return _named(node, kept, "overflow", f"{dtype.name.lower()} made it infinite or NaN")
        growth = made / max(given, eps)
        if made > VISIBLE * eps and growth > 1 and (worst is None or growth > worst[0]):
            found = _named(node, kept, "drift", "")
            worst = (growth, node) if found else worst
    if worst is None:
        return []
    growth, node = worst
    return _named(node, kept, "drift", f"its error grew {growth:.0f} times in {dtype.name.lower()}")


def _named(node: ir.Node, kept: Collection[str], code: str, why: str) -> list[Drift]:
    if node.name not in kept:
        return [Drift(str(node.name), code, why)]
    makers = [v.producer() for v in node.inputs if v is not None]
    return [
        Drift(str(maker.name), code, f"{why or 'its error grew'} in {node.name}")
        for maker in makers
        if maker is not None and maker.name not in kept
    ]


def _errors(
    single: ir.Model,
    half: ir.Model,
    runs: Sequence[Mapping[str, Array]],
    apart: Collection[str],
) -> dict[str, float]:
    """Largest difference of each value over its largest number; infinity for a NaN or overflow."""
    names = [name for name in inner_values(single) if name not in apart]
    found: dict[str, float] = {}
    pairs = zip(look_inside(single, names, runs), look_inside(half, names, runs), strict=True)
    for (_, expected), (_, actual) in pairs:
        for name in expected.keys() & actual.keys():
            error = relative_error(actual[name], expected[name])
            found[name] = max(error, found.get(name, 0.0))
    return found


def relative_error(actual: Array, expected: Array) -> float:
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(e)
    if a.shape != e.shape or not finite.any():
        return 0.0
    if not np.isfinite(a[finite]).all():
        return float("inf")
    size = float(np.abs(e[finite]).max())
    return float(np.abs(a[finite] - e[finite]).max()) / size if size else 0.0
