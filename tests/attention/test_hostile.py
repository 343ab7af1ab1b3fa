"""Which cases a proof runs."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.attention.hostile import hostile

SIZES = [{"batch": 1}, {"batch": 3}, {"batch": 2}]


def tokens(count: int) -> ir.Value:
    """(batch, count, 1) float32."""
    shape, dtype = ir.Shape(["batch", count, 1]), ir.TensorType(ir.DataType.FLOAT)
    return ir.Value(name="x", shape=shape, type=dtype)


def test_every_magnitude_runs_at_all_sizes() -> None:
    cases = list(hostile([tokens(7)], None, SIZES))
    assert [inputs["input_0"].shape[0] for _, inputs in cases] == [1, 1, 1, 3, 3, 3, 2, 2, 2]
    assert cases[1][0] == "inputs of size 0.001 at batch=1"


def test_very_many_scores_run_at_the_smallest_sizes_and_once_at_the_largest() -> None:
    cases = list(hostile([tokens(2048)], None, SIZES))  # 4 Mi scores a row
    assert [inputs["input_0"].shape[0] for _, inputs in cases] == [1, 1, 1, 3]


def test_a_brief_proof_runs_the_first_case_alone() -> None:
    assert len(list(hostile([tokens(7)], None, SIZES, brief=True))) == 1


def test_equal_sizes_run_at_every_magnitude() -> None:
    assert len(list(hostile([tokens(2048)], None, [{"batch": 1}]))) == 3
