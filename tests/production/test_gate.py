"""The last one out frees what a session holds, once."""

from __future__ import annotations

import gc
import weakref

import pytest

from attn_export.errors import UsageError
from attn_export.production.gate import Gate


class Held:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_an_idle_gate_releases_when_it_closes_and_only_once() -> None:
    held = Held()
    gate = Gate(held, held.release)
    with gate:
        assert held.released == 0
    assert (gate.is_open, held.released) == (True, 0)
    gate.close()
    gate.close()
    assert (gate.is_open, held.released) == (False, 1)
    with pytest.raises(UsageError, match="this session is closed"), gate:
        pass


def test_a_busy_gate_lets_those_inside_finish() -> None:
    held = Held()
    gate = Gate(held, held.release)
    with gate:
        with gate:
            gate.close()
            with pytest.raises(UsageError), gate:
                pass
        assert held.released == 0
    assert held.released == 1


def test_what_failed_inside_has_left() -> None:
    held = Held()
    gate = Gate(held, held.release)
    with pytest.raises(ValueError, match="inside"), gate:
        raise ValueError("inside")
    gate.close()
    assert held.released == 1


def test_a_gate_that_nobody_has_is_gone_with_what_it_held() -> None:
    held = Held()
    seen = weakref.ref(held)
    gate = Gate(held, held.release)
    del gate, held
    gc.collect()
    assert seen() is None
