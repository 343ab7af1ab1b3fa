"""A session around another: the inner one says where nodes ran, and is closed with it."""

from __future__ import annotations

import pytest

from attn_export.doctor.probe import cases, graph
from attn_export.errors import UsageError
from attn_export.precision.stored import AsStored
from attn_export.runtimes import ort_cpu


def test_what_ran_where_is_the_inner_sessions_to_say() -> None:
    with ort_cpu.load(graph().SerializeToString()) as inner:
        outer = AsStored(inner, ())
        assert outer.placement() == inner.placement() == {"CPUExecutionProvider": 1}
        assert [*outer.nodes()] == [*inner.nodes()] != []
        assert outer.processes == inner.processes


def test_closing_it_closes_the_inner_one() -> None:
    inner = ort_cpu.load(graph().SerializeToString())
    inputs, _ = next(iter(cases()))
    with AsStored(inner, ()) as outer:
        outer.run(inputs)
    with pytest.raises(UsageError, match="closed"):
        inner.run(inputs)
