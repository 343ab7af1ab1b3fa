"""Step after step with caches that stay where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_export.errors import InputError
from attn_export.fixed_caches import CAPACITY, FixedCaches
from attn_export.parity.tolerance import Array
from attn_export.production.gate import Gate
from attn_export.production.inputs import Signature, as_arrays
from attn_export.runtimes.base import Arrays, Session, TensorSpec, check_inputs
from attn_export.runtimes.shared_caches import SharedCaches

BLOCK = 256
"""Positions of the first buffers, where not told otherwise; each larger one has twice as many."""


class Decoding:
    """The caches of some rows, and a graph that continues them: `BundleSession.start` makes one.

    Past and present are one buffer, so that a step writes its new tokens and copies nothing. It
    begins with few positions and is moved to one of twice the size when it is full, up to the
    capacity that the bundle was exported with; behind that, steps are refused.

    For one thread at a time. Several of them may share the session.
    """

    def __init__(
        self,
        session: Session,
        caches: FixedCaches,
        signature: Signature,
        gate: Gate,
        rows: int,
        capacity: int | None,
    ) -> None:
        """`capacity`: positions to begin with.

        Raises:
            InputError: rows or positions that the bundle does not take.
            UsageError: the runtime does not continue caches in place.
        """
        low, high = signature.ranges.get("batch", (1, rows))
        if not low <= rows <= high:
            raise InputError(f"{rows} rows are asked for, the model takes {low} to {high}",
                             "start with fewer, or several times")  # fmt: skip
        first = min(BLOCK, caches.capacity) if capacity is None else capacity
        if not 1 <= first <= caches.capacity:
            raise InputError(
                f"{first} positions are asked for, the caches take 1 to {caches.capacity}",
                "give fewer, or export with a larger --cache-capacity",
            )
        self._caches, self._gate = caches, gate
        held = {*caches.outputs, caches.length}
        self._specs = tuple(spec for spec in signature.inputs if spec.name not in held)
        self._ranges = {n: bounds for n, bounds in signature.ranges.items() if n != CAPACITY}
        with gate:
            self._shared = SharedCaches(session, caches, rows, first)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What a step takes beside its caches."""
        return self._specs

    @property
    def rows(self) -> int:
        return self._shared.rows

    @property
    def length(self) -> int:
        """Tokens of each row that are cached."""
        return self._shared.length

    @property
    def capacity(self) -> int:
        """Positions of the buffers as they are now."""
        return self._shared.capacity

    @property
    def limit(self) -> int:
        """Positions that the buffers may grow to."""
        return self._caches.capacity

    def step(self, inputs: Mapping[str, Any]) -> Arrays:
        """The outputs for S new tokens of each row, without the caches, which hold them then.

        Args:
            inputs: by name; the caches and their length are not among them.

        Raises:
            InputError: an input is missing, unknown or of another dtype, rank or size; more tokens
                than the capacity; or several tokens of several rows behind a past. The caches are
                as they were.
            UsageError: the session is closed, or was opened before a fork.
            FileError: the runtime failed.
        """
        arrays = as_arrays(inputs)
        with self._gate:
            check_inputs(self._specs, arrays, self._ranges)
            self._check_rows(arrays)
            total = self._caches.room(self.length, arrays)
            if total > self.capacity:
                self._shared.grow(self._enough(total))
            return self._shared.step(arrays)

    def fill(self, outputs: Mapping[str, Array]) -> None:
        """Take over the caches that a prefill returned, by the names of its outputs.

        Raises:
            InputError: one is missing, or they do not fit.
            UsageError: as `step`.
        """
        given = {}
        for name, output in self._caches.outputs.items():
            if output not in outputs:
                raise InputError(f"'{output}' is missing", "give all that the prefill returned")
            given[name] = outputs[output]
        shapes = {array.shape[:1] + array.shape[2:3] for array in given.values()}
        (rows, size), *others = shapes
        if others or rows != self.rows or size > self._caches.capacity:
            raise InputError(
                f"the caches hold {size} tokens of {rows} rows, there is room for"
                f" {self._caches.capacity} of {self.rows}",
                "start with as many rows, and give a shorter prompt",
            )
        with self._gate:
            if size > self.capacity:
                self._shared.grow(self._enough(size))
            self._shared.fill(given)

    def rewind(self, length: int = 0) -> None:
        """Forget the tokens behind the first ones, as a draft that was rejected; buffers stay.

        Raises:
            InputError: fewer are cached.
        """
        if not 0 <= length <= self.length:
            raise InputError(
                f"{length} tokens are to be kept of {self.length}", "give as many or fewer"
            )
        self._shared.length = length

    def _enough(self, total: int) -> int:
        capacity = self.capacity
        while capacity < total:
            capacity *= 2
        return min(capacity, self._caches.capacity)

    def _check_rows(self, arrays: Mapping[str, Array]) -> None:
        for spec in self._specs:
            if spec.shape[:1] == ("batch",) and arrays[spec.name].shape[0] != self.rows:
                raise InputError(
                    f"input '{spec.name}' has {arrays[spec.name].shape[0]} rows, the caches"
                    f" {self.rows}",
                    "give each step all rows, or start again",
                )
