"""Look inside of a graph: run it with its intermediate values as outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attn_export.parity.tolerance import Array
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import Session
from attn_export.weights import write_graphs

AT_ONCE = 96  # values that are kept in memory together
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclass(frozen=True)
class Magnitude:
    """What a value reached in all runs: its largest finite number, and whether it was infinite."""

    largest: float
    infinite: bool

    def joined(self, other: Magnitude) -> Magnitude:
        return Magnitude(max(self.largest, other.largest), self.infinite or other.infinite)


def inner_values(model: ir.Model) -> list[str]:
    """The float values that the nodes of the main graph compute, in order."""
    return [
        str(value.name)
        for node in model.graph
        for value in node.outputs
        if value.dtype in FLOATS and value.name and (value.uses() or value.is_graph_output())
    ]


def look_inside(
    model: ir.Model, names: Sequence[str], runs: Sequence[Mapping[str, Array]]
) -> Iterator[tuple[int, dict[str, Array]]]:
    """(index of the run, value name -> array), some values at a time; the model is not changed.

    Runs on ONNX Runtime's CPU provider with its optimisations off, so that no value disappears.
    """
    for start in range(0, len(names), AT_ONCE):
        wanted = set(names[start : start + AT_ONCE])
        opened = model.clone()
        known = {str(value.name) for value in opened.graph.outputs}
        for node in opened.graph:
            opened.graph.outputs.extend(
                v for v in node.outputs if v.name in wanted and v.name not in known
            )
        with loaded(opened) as session:
            for index, inputs in enumerate(runs):
                found = session.run(inputs)
                yield index, {name: found[name] for name in wanted if name in found}


def loaded(model: ir.Model) -> Session:
    """A session of a model in memory, optimisations off.

    Raises:
        FileError: ONNX Runtime refuses it.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_graphs(Path(folder), {"graph.onnx": model}, "graph.data")
        return ort_cpu.load(Path(folder) / "graph.onnx", optimize=False)


def magnitudes(model: ir.Model, runs: Sequence[Mapping[str, Array]]) -> dict[str, Magnitude]:
    """How large each inner value of a float32 graph becomes on the given inputs."""
    found: dict[str, Magnitude] = {}
    for _, values in look_inside(model, inner_values(model), runs):
        for name, array in values.items():
            seen = magnitude(array)
            found[name] = seen.joined(found[name]) if name in found else seen
    return found


def magnitude(array: Array) -> Magnitude:
    values = np.abs(np.asarray(array, np.float64))
    finite = np.isfinite(values)
    return Magnitude(float(values[finite].max(initial=0.0)), bool(np.isinf(values).any()))
