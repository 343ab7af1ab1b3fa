"""Where inside a graph a runtime first leaves what PyTorch computes.

Values of the graph become outputs of it, a part at a time, and are compared with a yardstick:
PyTorch's own values, stored when the graph was exported, or else the same graph in float32 without
optimisations. The answer is the first value that is wrong while all that it is computed from is
right, on a way to an output that is wrong. Needs numpy, onnx and the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from attn_export.errors import AttnExportError
from attn_export.parity.deviation import Deviation
from attn_export.parity.drift import Cause, Drift
from attn_export.parity.evaluated import evaluate_nodes
from attn_export.parity.exposing import Exposable, chunks, is_half
from attn_export.parity.flow import Flow, Place
from attn_export.parity.tolerance import Array
from attn_export.parity.trace import Expected
from attn_export.parity.yardstick import Progress, PyTorch, Twin, Yardstick, compared

Wrong = Callable[[Mapping[str, Array]], list[str]]
"""The graph's outputs -> names of those that are wrong."""


def bisect(
    graph: Exposable,
    inputs: Mapping[str, Array],
    wrong: Wrong,
    trace: Mapping[str, Expected] | None = None,
    twin: Exposable | None = None,
    progress: Progress = lambda _: None,
    case: str = "",
) -> Drift | None:
    """The first value that leaves its budget; None where no output is wrong.

    Args:
        graph: on the runtime that is in question.
        trace: what values should be, by name; need not have all those of the graph.
        twin: the same graph in float32 on a runtime that is trusted more. It tells whether the
            graph is wrong or the runtime, and knows the values that the trace has not.
        case: what the inputs are called.

    Raises:
        AttnExportError: the runtime does not run the graph.
    """
    found = _Search(graph, inputs, wrong, trace or {}, twin, progress).run()
    return None if found is None else replace(found, case=case)


class _Search:
    def __init__(
        self,
        graph: Exposable,
        inputs: Mapping[str, Array],
        wrong: Wrong,
        trace: Mapping[str, Expected],
        twin: Exposable | None,
        progress: Progress,
    ) -> None:
        self.graph, self.inputs, self.wrong, self.progress = graph, inputs, wrong, progress
        self.flow = Flow(graph.model)
        self.twin = None if twin is None else Twin(twin, inputs)
        known = {name: trace[name] for name in graph.values() if name in trace}
        self.yardstick: Yardstick = PyTorch(known) if known or not self.twin else self.twin
        self.failing: list[str] = []
        self.outputs: dict[str, Array] = {}

    def run(self) -> Drift | None:
        self.outputs = self.graph.run(self.inputs)
        self.failing = self.wrong(dict(self.outputs))
        if not self.failing:
            return None
        on_the_way = self.flow.above(self.failing) & self.yardstick.names()
        names = [name for name in self.graph.values() if name in on_the_way]
        seen, hidden = self._look(names)
        if hidden:
            return self._one_at_a_time(names)
        good = {name for name, found in seen.items() if not found.drifts}
        return self._drift(self._root(seen), good, seen)

    def _look(self, names: Sequence[str]) -> tuple[dict[str, Deviation], bool]:
        """Compare the values; also whether the error is gone while they are looked at."""
        seen: dict[str, Deviation] = {}
        for part in chunks(names, self.yardstick.bytes_of):
            self.progress(f"looking for the first wrong value, {len(seen)} of {len(names)} seen")
            found, wrong = self._compare(part)
            if not wrong:
                return seen, True
            seen |= found
        return seen, False

    def _compare(self, names: Sequence[str]) -> tuple[dict[str, Deviation], list[str]]:
        """The values, and the outputs that are wrong while they are looked at."""
        actual = self.graph.run(self.inputs, names)
        found = compared(self.flow, names, actual, self.yardstick.expected(names))
        return found, self.wrong({name: actual[name] for name in self.graph.outputs})

    def _root(self, seen: Mapping[str, Deviation]) -> str:
        """The first wrong value, on a way to a wrong output, that only right ones lead to."""
        bad = {name for name, found in seen.items() if found.drifts} | {*self.failing}
        good = seen.keys() - bad
        reached: set[str] = set()
        todo, roots = list(self.failing), list[str]()
        while todo:
            value = todo.pop()
            if value in reached:
                continue
            reached.add(value)
            _, before = self.flow.causes(value, good, bad)
            todo += before
            roots += [] if before else [value]
        return min(roots, key=lambda name: self.flow.producer.get(name, -1))

    def _one_at_a_time(self, names: Sequence[str]) -> Drift:
        """Halve the values between one that is right and one that is wrong, each seen alone."""
        seen: dict[str, Deviation] = {}
        right, wrong, hidden = -1, len(names), ""
        while wrong - right > 1 and not hidden:
            middle = (right + wrong) // 2
            self.progress(f"looking at one value at a time, {wrong - right} left")
            found, failing = self._compare([names[middle]])
            seen |= found
            if any(value.drifts for value in found.values()):
                wrong = middle
            elif failing:
                right = middle
            else:
                wrong, hidden = middle, names[middle]
        value = names[wrong] if wrong < len(names) else self.failing[0]
        drift = self._drift(value, {*names[:wrong]}, seen)
        return replace(drift, one_at_a_time=True, hidden_by=hidden)

    def _drift(self, value: str, good: Collection[str], seen: Mapping[str, Deviation]) -> Drift:
        nodes, _ = self.flow.causes(value, good)
        found = seen.get(value)
        found = found if found is not None and found.drifts else None
        cause = self._cause(value, found, nodes)
        if cause in ("runtime", "precision") and self.yardstick is not self.twin:
            finer = self._finer(nodes) if len(nodes) > 1 else None
            if finer is not None:
                found, nodes = finer, [self.flow.producer[finer.value]]
        return Drift(
            value=found.value if found else value,
            place=self._blamed(nodes),
            between=tuple(self.flow.place(index).node for index in nodes),
            deviation=found,
            cause=cause,
            yardstick=self.yardstick.name,
            compared=len(seen),
        )

    def _blamed(self, nodes: Sequence[int]) -> Place | None:
        """Of a site, its attention op first, or else the first node that computes with inputs."""
        places = [self.flow.place(index) for index in nodes]
        computing = [self.flow.place(index) for index in nodes if self.flow.from_inputs(index)]
        sites = [place for place in places if place.site]
        fused = [place for place in sites if place.op.endswith("Attention")]
        return next(iter([*fused, *sites, *computing, *places]), None)

    def _cause(self, value: str, found: Deviation | None, nodes: Sequence[int]) -> Cause:
        """Whether the twin is wrong there too, and the evaluator from the same inputs."""
        other: Cause = "precision" if is_half(self.graph.model) else "runtime"
        if self.twin is None or value not in self.flow.producer:
            return "unknown"
        if self.yardstick is self.twin and found is not None:
            return other
        try:
            made = self.twin.run([value])
        except AttnExportError:
            return "unknown"
        if found is None:  # an output, and no value before it is known to be wrong
            again = {name: made[name].astype(array.dtype) for name, array in self.outputs.items()}
            return "graph or kernel" if value in self.wrong(again) else other
        if not self._drifts(value, made[value]):
            return other
        exact = evaluate_nodes(self.twin.graph.model, self.flow, nodes, value, self.twin.given)
        if exact is None:
            return "graph or kernel"
        return "graph" if self._drifts(value, exact) else "kernel"

    def _drifts(self, value: str, array: Array) -> bool:
        """Whether another run is wrong there too."""
        again = compared(self.flow, [value], {value: array}, self.yardstick.expected([value]))
        return value not in again or again[value].drifts

    def _finer(self, nodes: Sequence[int]) -> Deviation | None:
        """The first value that these nodes give and the twin gives otherwise.

        None where looking at them hides the error, or a runtime does not let them be looked at.
        """
        if self.twin is None:
            return None
        names = [name for index in nodes for name in self.flow.nodes[index].output if name]
        try:
            actual, expected = self.graph.run(self.inputs, names), self.twin.expected(names)
        except AttnExportError:
            return None
        found = compared(self.flow, names, actual, expected).values()
        return next((value for value in found if value.drifts), None)
