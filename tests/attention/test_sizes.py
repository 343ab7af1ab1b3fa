"""Sizes are read by the names that people give them."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from attn_export.attention.sizes import evaluate


@pytest.mark.parametrize("name", ["S", "N", "E", "I", "beta", "batch_size", "s0"])
def test_a_name_that_means_something_to_sympy_is_a_size_like_any_other(name: str) -> None:
    assert evaluate(f"2*{name} + 1", {name: 3}) == 7


def test_functions_in_a_size_stay_functions() -> None:
    assert evaluate("Max(S, T)*floor(T/2)", {"S": 3, "T": 5}) == 10


def test_an_unknown_size_has_no_number() -> None:
    with pytest.raises(ValueError, match="unknown"):
        evaluate(ir.SymbolicDim(None), {"batch": 2})
