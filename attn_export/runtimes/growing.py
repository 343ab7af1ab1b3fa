"""A session whose caches have a fixed capacity, as one whose caches grow. Needs numpy alone.

Stored cases hold caches (B, K, P, H) as PyTorch has them. Here they go into buffers that past and
present share, with garbage behind what is filled: an answer that depends on it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from attn_export.fixed_caches import CAPACITY, FixedCaches
from attn_export.parity.tolerance import Array
from attn_export.runtimes.around import Around
from attn_export.runtimes.base import Arrays, Session
from attn_export.runtimes.shared_caches import SharedCaches, shares

SPARE = 3
"""Positions behind those that are used."""
GARBAGE = (float("nan"), 1e4)


class Growing(Around):
    """Takes caches (B, K, P, H), and gives them back with S more positions."""

    def __init__(self, session: Session, caches: FixedCaches) -> None:
        inputs = [
            replace(
                spec,
                shape=tuple(caches.size if size == CAPACITY else size for size in spec.shape),
            )
            for spec in session.inputs
            if spec.name != caches.length
        ]
        ranges = {**session.ranges, caches.size: (0, caches.capacity - 1)}
        ranges.pop(CAPACITY, None)
        super().__init__(session.runtime, inputs, ranges)
        self.session, self._caches = session, caches
        self.right_padded, self.fallback = session.right_padded, session.fallback

    def _run(self, inputs: Mapping[str, Array]) -> Arrays:
        names, axis = self._caches.outputs, self._caches.axis
        given = {name: array for name, array in inputs.items() if name not in names}
        first = inputs[next(iter(names))]
        total = self._caches.room(first.shape[axis], given)
        capacity = min(total + SPARE, self._caches.capacity)
        if shares(self.session):
            buffers = SharedCaches(self.session, self._caches, first.shape[0], capacity)
            buffers.fill(inputs)
            buffers.spoil(GARBAGE)
            return {**buffers.step(given), **buffers.filled()}
        made = self.session.run(
            {**given, **{name: _padded(inputs[name], axis, capacity) for name in names},
             self._caches.length: np.array([first.shape[axis]], np.int64)}
        )  # fmt: skip
        cut = {name: made[name].take(range(total), axis) for name in names.values()}
        return {**made, **cut}

    def bound(self, inputs: Mapping[str, Array]) -> tuple[Session, Arrays]:
        """A session that takes this step over and over in the same buffers, and its inputs."""
        names = self._caches.outputs
        first = inputs[next(iter(names))]
        given = {name: array for name, array in inputs.items() if name not in names}
        total = self._caches.room(first.shape[self._caches.axis], given)
        buffers = SharedCaches(self.session, self._caches, first.shape[0], total)
        buffers.fill(inputs)
        return _Again(self.session, buffers, given), given


class _Again(Session):
    """One step at one length, to be timed; the session that it runs on is closed by its owner."""

    def __init__(self, session: Session, buffers: SharedCaches, given: Mapping[str, Array]) -> None:
        super().__init__(session.runtime, [s for s in session.inputs if s.name in given])
        self._session, self._buffers, self._length = session, buffers, buffers.length

    def _run(self, inputs: Mapping[str, Array]) -> Arrays:
        self._buffers.length = self._length
        return self._buffers.step(inputs)

    def placement(self) -> dict[str, int]:
        return self._session.placement()

    def _close(self) -> None:
        pass


def _padded(array: Array, axis: int, capacity: int) -> Array:
    """A buffer with garbage behind the cache."""
    shape = list(array.shape)
    shape[axis] = capacity - array.shape[axis]
    behind = np.full(shape, GARBAGE[0], array.dtype)
    return np.concatenate([array, behind], axis)


def timed(session: Session, inputs: Mapping[str, Array]) -> tuple[Session, Arrays] | None:
    """The session and inputs to be timed, where caches are continued in place."""
    if isinstance(session, Growing) and shares(session.session):
        return session.bound(inputs)
    return None
