"""Attention must be where it was asked for: the rule, on what ONNX Runtime really recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attn_export.doctor.probe import graph
from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import LoadOptions, Placed
from attn_export.runtimes.ort import CPU, OrtSession
from attn_export.runtimes.placement import counts, is_attention, misplaced, told

CPU_NAME, CUDA_NAME = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.fixture(scope="module")
def recorded(digits_bundle: Path) -> list[Placed]:
    with ort_cpu.load(digits_bundle / "model.cpu.onnx", threads=1) as session:
        return session.nodes()


def test_the_fused_nodes_of_a_real_session_are_attention(recorded: list[Placed]) -> None:
    found = [node.name for node in recorded if is_attention(node)]
    assert found == [f"blocks.{i}.attn/Attention" for i in range(6)]
    assert misplaced(recorded, CPU_NAME) == []


def test_one_attention_node_elsewhere_is_found_among_all(recorded: list[Placed]) -> None:
    """As on CUDA, but for one node that has no kernel there."""
    moved = [
        node if node.name == "blocks.3.attn/Attention" else replace(node, provider=CUDA_NAME)
        for node in recorded
    ]
    assert counts(moved) == {CUDA_NAME: len(recorded) - 1, CPU_NAME: 1}
    (node,) = misplaced(moved, CUDA_NAME)
    assert told([node], CUDA_NAME) == (
        "CPUExecutionProvider runs Attention 'blocks.3.attn/Attention', not CUDAExecutionProvider"
    )


def test_shape_arithmetic_on_the_cpu_is_no_fallback(recorded: list[Placed]) -> None:
    """ONNX Runtime leaves it there on purpose."""
    moved = [
        node if node.op in ("Shape", "Gather", "Concat") else replace(node, provider=CUDA_NAME)
        for node in recorded
    ]
    assert CPU_NAME in counts(moved)
    assert misplaced(moved, CUDA_NAME) == []


def test_a_softmax_is_attention_where_it_is_written_out() -> None:
    softmax = Placed(CPU_NAME, "", "Softmax", "s")
    assert misplaced([softmax, Placed(CPU_NAME, "", "MatMul", "m")], CUDA_NAME) == [softmax]


def test_another_domains_attention_is_not_taken_for_ours() -> None:
    assert not is_attention(Placed(CPU_NAME, "my.ops", "Attention", "a"))
    assert is_attention(Placed(CPU_NAME, "ai.onnx", "Attention", "a"))


class Elsewhere(OrtSession):
    """As if the first provider were another one than that which runs the nodes."""

    def nodes(self) -> list[Placed]:
        return [replace(node, provider="SomeExecutionProvider") for node in super().nodes()]


def test_a_session_that_places_attention_elsewhere_is_refused_unless_that_is_allowed() -> None:
    model = graph().SerializeToString()
    with pytest.raises(RuntimeUnavailable) as raised:
        Elsewhere("ort-some", model, [CPU], 1)
    assert str(raised.value) == (
        "SomeExecutionProvider runs Attention 'attention', not CPUExecutionProvider;"
        " allow that with --allow-fallback, or export it again."
    )
    with Elsewhere("ort-some", model, [CPU], 1, LoadOptions(allow_fallback=True)) as session:
        assert session.fallback.startswith("SomeExecutionProvider runs Attention")
