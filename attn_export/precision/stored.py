"""A session whose half inputs and outputs look as the stored cases do. Needs numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attn_export.parity.tolerance import Array
from attn_export.runtimes.around import Around
from attn_export.runtimes.base import Arrays, Session


class AsStored(Around):
    """Takes and gives float32 where the graph has float16, as caches do."""

    def __init__(self, session: Session, half: Sequence[str]) -> None:
        inputs = [
            replace(spec, dtype="float32") if spec.name in half else spec for spec in session.inputs
        ]
        super().__init__(session.runtime, inputs, session.ranges)
        self.session, self._half = session, frozenset(half)
        self.fallback = session.fallback

    def _run(self, inputs: Mapping[str, Array]) -> Arrays:
        return self.given(self.session.run(self.native(inputs)))

    def given(self, made: Mapping[str, Array]) -> Arrays:
        """Outputs of the graph as the stored cases have them."""
        return {
            name: array.astype(np.float32) if name in self._half else array
            for name, array in made.items()
        }

    def native(self, inputs: Mapping[str, Array]) -> Arrays:
        """The inputs as the graph takes them."""
        return {
            name: array.astype(np.float16) if name in self._half else np.asarray(array)
            for name, array in inputs.items()
        }


def as_stored(session: Session, target: Mapping[str, Any]) -> Session:
    """The session itself where the target's inputs and outputs are as stored."""
    half = target.get("half_io", ())
    return AsStored(session, half) if half else session


def native(session: Session, inputs: Mapping[str, Array]) -> tuple[Session, Arrays]:
    """The session itself and the inputs that it takes, so that no conversion is timed."""
    if isinstance(session, AsStored):
        return session.session, session.native(inputs)
    return session, dict(inputs)
