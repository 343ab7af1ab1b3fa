"""Two names for one runtime are no comparison."""

from __future__ import annotations

import pytest

from attn_export.errors import RuntimeUnavailable
from attn_export.parity.result import RuntimeResult
from attn_export.verifying.twins import refuse_twins

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def ran(**placements: dict[str, int]) -> dict[str, RuntimeResult]:
    return {name: RuntimeResult(name, (), nodes) for name, nodes in placements.items()}


def test_a_fallback_to_the_cpu_is_refused() -> None:
    with pytest.raises(RuntimeUnavailable, match="cpu and cuda turned out to be the same"):
        refuse_twins(ran(cpu={CPU: 9}, cuda={CPU: 8}))


@pytest.mark.parametrize("nodes", [{CUDA: 9}, {CUDA: 7, CPU: 2}, {}])
def test_a_runtime_that_is_another_is_not(nodes: dict[str, int]) -> None:
    refuse_twins(ran(cpu={CPU: 9}, cuda=nodes))


def test_devices_of_other_libraries_are_not_compared() -> None:
    refuse_twins(ran(torch={"CPU": 1}, openvino={"CPU": 9}))


def test_a_stand_in_is_named_as_one_and_may_be_the_same() -> None:
    stand_in = RuntimeResult("ort-cpu", (), {CPU: 9}, stands_in_for="ort-cuda")
    refuse_twins({**ran(cpu={CPU: 9}), "cuda": stand_in})
