"""A run of steps with the runtime's own caches, against the full pass. Numpy alone.

One step at a time, each fed the caches that the runtime itself returned before, must give what
PyTorch gave for all tokens at once: the logits of each token, and after each token the caches as
far as they have grown. A cache that is written in the wrong order or one place off shows here, and
not in single calls that are fed PyTorch's caches.

Which run there is follows from the model:

1. a component without caches (prefill) takes several tokens: it takes the first of a case's tokens,
   the step the others, against the case's own outputs;
2. the step itself takes several tokens: it takes those of a case one by one;
3. the step takes one token: cases named "..., step N" follow on a case, each PyTorch's next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attn_export import bundle as bundles
from attn_export.errors import AttnExportError
from attn_export.parity.compare import Comparison, compare, failed
from attn_export.parity.generate import TOKEN
from attn_export.parity.judge import judge
from attn_export.parity.tolerance import Array
from attn_export.reference import Case
from attn_export.runtimes.base import Session

STEP = re.compile(r"(.*), step (\d+)")
Labelled = tuple[str, Comparison]


def check(
    bundle: bundles.Bundle, sessions: Mapping[str, Session], cases: Sequence[Case]
) -> tuple[list[Labelled], str]:
    """Comparisons of every run of steps, and why there is none where the model has caches."""
    state = bundle.manifest.get("state", ())
    if not state:
        return [], ""
    walk = Walk(bundle, sessions)
    found: list[Labelled] = []
    for case in cases:
        found += walk.of_case(case)
    found += walk.of_chains(cases)
    why_not = "no run of several steps was compared: no case has several tokens that can be split"
    return found, "" if found else why_not


@dataclass
class Walk:
    """The parts of a model with caches.

    Attributes:
        step: the component that takes the caches.
    """

    bundle: bundles.Bundle
    sessions: Mapping[str, Session]
    step: str = field(init=False)

    def __post_init__(self) -> None:
        caches = {entry["input"] for entry in self.state}
        self.step = next((c for c in self.bundle.components if caches <= self.inputs(c).keys()), "")

    @property
    def state(self) -> list[dict[str, Any]]:
        return list(self.bundle.manifest["state"])

    def inputs(self, component: str) -> dict[str, list[int | str]]:
        return self._shapes("inputs", component)

    def outputs(self, component: str) -> dict[str, list[int | str]]:
        return self._shapes("outputs", component)

    def _shapes(self, key: str, component: str) -> dict[str, list[int | str]]:
        rows = self.bundle.manifest[key]
        return {row["name"]: row["shape"] for row in rows if row["component"] == component}

    def of_case(self, case: Case) -> list[Labelled]:
        """A case's tokens one by one; nothing where it has one token, or cannot be split."""
        shape = self.inputs(case.component).get(TOKEN, ())
        caches = {entry["output"] for entry in self.state}
        if not self.step or len(shape) != 2 or not isinstance(shape[1], str):
            return []
        if not caches <= case.outputs.keys():
            return []
        start = 0 if case.component == self.step else self._first_open(case, shape[1])
        total = case.inputs[TOKEN].shape[1]
        if total - start < 2:
            return []
        return list(self._steps(case, shape[1], start, total))

    def _first_open(self, case: Case, tokens: str) -> int:
        """The first token that the step can take: what it has no input for must be ones there."""
        start = 1
        for name, shape in self.inputs(case.component).items():
            if name in self.inputs(self.step) or tokens not in shape:
                continue
            array = case.inputs[name]
            closed = np.flatnonzero((array != 1).any(axis=0)) if array.ndim == 2 else [len(array)]
            start = max(start, int(max(closed, default=0)) + 1)
        return start

    def _steps(self, case: Case, tokens: str, start: int, total: int) -> Iterator[Labelled]:
        caches = {entry["input"]: case.inputs.get(entry["input"]) for entry in self.state}
        past = 0
        if case.component == self.step:
            entry = next(e for e in self.state if self._grows(e))
            past = case.inputs[entry["input"]].shape[entry["axis"]]
        for position in range(max(start - 1, 0), total):
            first = position < start
            component = case.component if first else self.step
            label = f"{case.name}, {position + 1} of {total} tokens" + (
                " at once" if first else " one by one"
            )
            low, high = (0, start) if first else (position, position + 1)
            feeds = self._feeds(case, component, tokens, (low, high), past, caches)
            missing = self.inputs(component).keys() - feeds.keys()
            if missing:
                yield label, failed(TOKEN, f"no step has the input {', '.join(sorted(missing))}")
                return
            try:
                outputs = self.sessions[component].run(feeds)
            except AttnExportError as error:
                yield label, failed(TOKEN, f"the runtime raised {error.observed}")
                return
            for result in self._compared(case, outputs, tokens, (low, high), past):
                yield label, result
            caches = {e["input"]: outputs.get(e["output"]) for e in self.state}

    def _feeds(
        self,
        case: Case,
        component: str,
        tokens: str,
        span: tuple[int, int],
        past: int,
        caches: Mapping[str, Array | None],
    ) -> dict[str, Array]:
        """The case's inputs for some of its tokens, with these caches."""
        feeds = {}
        whole = case.inputs[TOKEN].shape[1]
        for name in self.inputs(component):
            cache = caches.get(name)
            if cache is not None:
                feeds[name] = cache
            elif name in case.inputs:
                array, given = case.inputs[name], self.inputs(case.component)[name]
                for axis, size in enumerate(given):
                    if size == tokens:
                        array = array.take(range(*span), axis)
                    elif axis and isinstance(size, str) and array.shape[axis] == past + whole:
                        array = array.take(range(past + span[1]), axis)
                feeds[name] = array
        return feeds

    def _compared(
        self,
        case: Case,
        outputs: Mapping[str, Array],
        tokens: str,
        span: tuple[int, int],
        past: int,
    ) -> Iterator[Comparison]:
        """The part of the full pass that these tokens have."""
        growing = {e["output"]: e["axis"] for e in self.state if self._grows(e)}
        rules = self.bundle.rules()[case.component]
        for name, shape in self.outputs(case.component).items():
            axis = growing.get(name)
            if axis is None and tokens in shape[1:]:
                part = range(*span)
                axis = shape.index(tokens)
            elif axis is not None:
                part = range(past + span[1])
            else:
                continue
            if name not in outputs:
                yield failed(name, "the runtime did not return it")
                continue
            truth = case.truth.get(name)
            yield from compare(
                name, outputs[name], case.outputs[name].take(part, axis), case.allowed[name],
                None if truth is None else truth.take(part, axis), rules[name].groups,
            )  # fmt: skip

    def _grows(self, entry: Mapping[str, Any]) -> bool:
        """Whether a cache's axis is one of the sizes that may vary, and is not the batch."""
        size = self.inputs(self.step)[entry["input"]][entry["axis"]]
        return isinstance(size, str) and size != "batch"

    def of_chains(self, cases: Sequence[Case]) -> list[Labelled]:
        """Stored steps that follow one another, each with the runtime's own caches."""
        mine = {case.name: case for case in cases if case.component == self.step}
        chains: dict[str, list[Case]] = {}
        for name, case in mine.items():
            if (match := STEP.fullmatch(name)) and match[1] in mine:
                chains.setdefault(match[1], [mine[match[1]]]).append(case)
        found: list[Labelled] = []
        for chain in chains.values():
            caches: dict[str, Array] = {}
            for case in chain:
                label = f"{case.name} with its own caches"
                try:
                    outputs = self.sessions[self.step].run({**case.inputs, **caches})
                except AttnExportError as error:
                    found.append((label, failed(TOKEN, f"the runtime raised {error.observed}")))
                    break
                rules = self.bundle.rules()[self.step]
                found += [(label, result) for result in judge(outputs, case, rules)]
                caches = {e["input"]: outputs[e["output"]] for e in self.state
                          if e["output"] in outputs}  # fmt: skip
        return found
