"""A bundle that is open on one runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from attn_export.bundle import Bundle
from attn_export.errors import InputError, UsageError
from attn_export.fixed_caches import FixedCaches
from attn_export.parity.compare import Comparison
from attn_export.parity.generate import Run, steps
from attn_export.parity.result import RuntimeResult
from attn_export.production.choice import Choice
from attn_export.production.decoding import Decoding
from attn_export.production.gate import Gate
from attn_export.production.generation import in_place
from attn_export.production.inputs import Signature, as_arrays
from attn_export.runtimes.base import Arrays, Session, TensorSpec
from attn_export.sessions import as_grown, growing
from attn_export.verifying.checking import check_session, nothing_compared


class BundleSession:
    """What `attn_export.load` returns. Threads may share it; it may be pickled.

    A copy made by pickle opens the same bundle again, by its path, on the same runtime; it fails if
    the bundle has changed. In a forked child every method refuses, since runtimes do not survive a
    fork: open another one there with `reopen()`.

    Attributes:
        name: the bundle's.
        runtime: the one that runs it; `choice` tells why.
        components: the graphs that are open.
        fallback: component -> attention that another execution provider runs, where that was
            allowed.
    """

    def __init__(
        self,
        bundle: Bundle,
        choice: Choice,
        sessions: Mapping[str, Session],
        again: partial[BundleSession],
    ) -> None:
        """`sessions` by component, which close with this one; `again` opens another like it."""
        self.name, self.choice, self.components = bundle.name, choice, tuple(sessions)
        self._bundle, self._sessions, self._again = bundle, dict(sessions), again
        self.fallback = {name: made.fallback for name, made in sessions.items() if made.fallback}
        self._signatures = {name: Signature.of(bundle.manifest, name) for name in sessions}
        self._gate = Gate(self._sessions, partial(_close, tuple(self._sessions.values())))

    @property
    def runtime(self) -> str:
        return self.choice.runtime

    def inputs(self, component: str | None = None) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of each input; a size that may vary is a name."""
        return self._signatures[self._named(component)].inputs

    def run(self, inputs: Mapping[str, Any], component: str | None = None) -> Arrays:
        """Outputs by name.

        Args:
            inputs: numpy arrays by name, or objects with DLPack's protocol in host memory.
            component: which graph; may be left out where there is only one.

        Raises:
            InputError: an input is missing, unknown, no array, or of another dtype, rank or size
                than the bundle takes. The runtime has not seen it.
            UsageError: the session is closed, was opened before a fork, or has no such component.
            FileError: the runtime failed.
        """
        with self._gate:
            name = self._named(component)
            return self._sessions[name].run(self._signatures[name].arrays(inputs))

    def generate(
        self, inputs: Mapping[str, Any], max_length: int | None = None
    ) -> NDArray[np.int64]:
        """Tokens int64 (B, steps), without the one that starts it; ended rows repeat the end token.

        Args and errors: as `stream`.
        """
        return np.stack(list(self.stream(inputs, max_length)), axis=1)

    def stream(
        self, inputs: Mapping[str, Any], max_length: int | None = None
    ) -> Iterator[NDArray[np.int64]]:
        """The most likely token of each row, int64 (B,), step after step, until all have ended.

        Args:
            inputs: of the components that run once (an encoder, or a prefill); prompts are padded
                on the left.
            max_length: the most tokens; the manifest's where it is left out.

        Raises:
            InputError: as `run`, and where the caches cannot take `max_length` tokens.
            UsageError: as `run`, and where the bundle has no loop or not all of it is open.
        """
        manifest = self._bundle.manifest
        if "generate" not in manifest:
            raise UsageError(f"{self.name} has no loop to generate with", "call run")
        if missing := [name for name in self._bundle.components if name not in self.components]:
            raise UsageError(
                f"generation needs '{missing[0]}', which is not open", "load without component="
            )
        arrays, known = as_arrays(inputs), set[str]()
        for name in self.components:
            known |= {spec.name for spec in self.inputs(name)}
        for name in arrays.keys() - known:
            raise InputError(f"no component has an input '{name}'", "leave it out")
        runs: dict[str, Run] = {n: partial(self.run, component=n) for n in self.components}
        if self._fixed(self.components[-1]) is not None:
            return in_place(self, manifest, runs, arrays, max_length)
        return (step.tokens for step in steps(manifest, runs, arrays, max_length))

    def start(
        self, rows: int = 1, component: str | None = None, *, capacity: int | None = None
    ) -> Decoding:
        """Empty caches for some rows, which steps continue in place.

        Args:
            component: which graph; by default the one that has such caches.
            capacity: positions to begin with; they grow by doubling up to the bundle's own.

        Raises:
            InputError: rows or positions that the bundle does not take.
            UsageError: as `run`; or no such graph has caches of a fixed capacity, or the runtime
                does not continue them in place.
        """
        found = {name: fixed for name in self.components if (fixed := self._fixed(name))}
        name = next(iter(found), None) if component is None else self._named(component)
        if name not in found:
            raise UsageError(
                f"{name or self.name} has no caches of a fixed capacity",
                "export it with --cache-capacity, or call run",
            )
        return Decoding(
            self._sessions[name], found[name], self._signatures[name], self._gate, rows, capacity
        )

    def _fixed(self, component: str) -> FixedCaches | None:
        return FixedCaches.of(self._bundle.manifest, component)

    def warmup(self) -> None:
        """Run every combination of sizes among the stored cases once."""
        with self._gate:
            seen = set()
            for case in self._bundle.cases():
                sizes = (case.component, *(array.shape for array in case.inputs.values()))
                if case.component in self.components and sizes not in seen:
                    seen.add(sizes)
                    self._as_stored(case.component).run(case.inputs)

    def verify(self) -> RuntimeResult:
        """Compare with the PyTorch outputs that the bundle carries, and each row alone.

        Raises:
            UsageError: as `run`.
            FileError: the stored cases do not parse.
        """
        with self._gate:
            cases, compared = self._bundle.cases(), list[tuple[str, Comparison]]()
            bundle = as_grown(self._bundle)
            for name in self._sessions:
                mine = [case for case in cases if case.component == name]
                checked = list(check_session(bundle, self._as_stored(name), mine))
                compared += checked or nothing_compared(bundle, name)
            return RuntimeResult(self.runtime, tuple(compared), self.placement())

    def placement(self) -> dict[str, int]:
        """Execution provider (or device) to the number of nodes that it runs, of all components."""
        with self._gate:
            total: dict[str, int] = {}
            for session in self._sessions.values():
                for provider, nodes in session.placement().items():
                    total[provider] = total.get(provider, 0) + nodes
            return total

    def reopen(self) -> BundleSession:
        """Another session of the same bundle, runtime and options, also in a forked child.

        Raises:
            FileError: the bundle has changed; else as `load`.
        """
        return self._again()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._again.func, self._again.args

    def close(self) -> None:
        """Refuse further calls; those that run in other threads finish, then memory is freed."""
        self._gate.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._gate.is_open else ", closed"
        return f"<BundleSession {self.name}: {', '.join(self.components)} on {self.runtime}{state}>"

    def _as_stored(self, component: str) -> Session:
        """Caches of the stored cases grow."""
        return growing(self._bundle, component, self._sessions[component])

    def _named(self, component: str | None) -> str:
        if component is None and len(self.components) == 1:
            return self.components[0]
        if component in self.components:
            return component
        have = ", ".join(self.components)
        if component is None:
            raise UsageError(f"several components are open: {have}", "name one with component=")
        raise UsageError(f"no component '{component}' is open", f"those that are: {have}")


def _close(sessions: Sequence[Session]) -> None:
    """Not a method: a session in a cycle would keep its memory until it is collected."""
    for session in sessions:
        session.close()
