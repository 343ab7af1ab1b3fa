"""What the values of a graph are compared with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from attn_export.parity import drift
from attn_export.parity.deviation import Deviation, deviation
from attn_export.parity.exposing import Exposable, chunks
from attn_export.parity.flow import Flow
from attn_export.parity.tolerance import Array
from attn_export.parity.trace import Expected, expect

GUESS = 2**22  # bytes of a value whose shape is not known beforehand
Progress = Callable[[str], None]


class Yardstick(ABC):
    """What values should be, by name."""

    name: drift.Yardstick

    @abstractmethod
    def names(self) -> set[str]: ...

    @abstractmethod
    def bytes_of(self, name: str) -> int:
        """How much memory a value takes, about."""

    @abstractmethod
    def expected(self, names: Sequence[str]) -> Mapping[str, Expected]: ...


@dataclass
class PyTorch(Yardstick):
    """PyTorch's own values, as they were stored when the graph was exported."""

    trace: Mapping[str, Expected]
    name: drift.Yardstick = "pytorch"

    def names(self) -> set[str]:
        return set(self.trace)

    def bytes_of(self, name: str) -> int:
        return 8 * prod(self.trace[name].shape)

    def expected(self, names: Sequence[str]) -> Mapping[str, Expected]:
        return self.trace


@dataclass
class Twin(Yardstick):
    """Another graph whose values have the same names, run on the same inputs."""

    graph: Exposable
    inputs: Mapping[str, Array]
    name: drift.Yardstick = "twin"

    def names(self) -> set[str]:
        return set(self.graph.values())

    def bytes_of(self, name: str) -> int:
        return GUESS

    def run(self, names: Sequence[str]) -> dict[str, Array]:
        wide = {
            name: array.astype(np.float32) if array.dtype == np.float16 else array
            for name, array in self.inputs.items()
        }
        return self.graph.run(wide, names)

    def given(self, names: Sequence[str]) -> dict[str, Array]:
        """Values, inputs and weights of the graph."""
        known = {**self.inputs, **self.run([name for name in names if name not in self.inputs])}
        return {name: known[name] for name in names}

    def expected(self, names: Sequence[str]) -> Mapping[str, Expected]:
        made = self.run(names)
        return {name: expect(made[name]) for name in names if made[name].size}


def compared(
    flow: Flow, names: Iterable[str], actual: Mapping[str, Array], expected: Mapping[str, Expected]
) -> dict[str, Deviation]:
    """The deviation of each value that can be compared."""
    found = {}
    for name in names:
        if name in expected and name in actual and name in flow.producer:
            place = flow.place(flow.producer[name])
            seen = deviation(name, place, actual[name], expected[name])
            if seen is not None:
                found[name] = seen
    return found


def deviations(
    graph: Exposable,
    reference: Exposable,
    inputs: Mapping[str, Array],
    progress: Progress = lambda _: None,
) -> list[Deviation]:
    """Every value of a graph next to the one of that name in another graph, in order.

    For a graph in 16 bits and its twin in float32 (`exposing.in_single`): the first that
    `overflows` or `drifts`. A value that is looked at is rounded to its own dtype, also where the
    runtime would keep it wider, as ONNX Runtime's CPU provider does between nodes that it has no
    float16 kernel for: `bisect` tells whether that reaches an output.

    Raises:
        AttnExportError: a runtime does not run one of the graphs.
    """
    flow, yardstick = Flow(graph.model), Twin(reference, inputs)
    known = yardstick.names()
    names = [name for name in graph.values() if name in known]
    found: list[Deviation] = []
    for part in chunks(names, yardstick.bytes_of):
        progress(f"comparing values inside the graph, {len(found)} of {len(names)}")
        actual, expected = graph.run(inputs, part), yardstick.expected(part)
        found += compared(flow, part, actual, expected).values()
    return found
