"""Inputs are checked before a runtime sees them, so that each refusal is one sentence."""

from __future__ import annotations

import numpy as np
import pytest

from attn_export.errors import UsageError
from attn_export.runtimes.base import TensorSpec, check_inputs

SPECS = [
    TensorSpec("tokens", "int64", ("batch", "length")),
    TensorSpec("mask", "bool", ("batch", "length")),
    TensorSpec("image", "float32", ("batch", 3)),
]
GOOD = {
    "tokens": np.zeros((2, 5), np.int64),
    "mask": np.zeros((2, 5), np.bool_),
    "image": np.zeros((2, 3), np.float32),
}


def test_inputs_that_fit_pass_at_any_size() -> None:
    check_inputs(SPECS, GOOD)
    check_inputs(SPECS, {name: np.repeat(array, 4, axis=0) for name, array in GOOD.items()})


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("picture", GOOD["image"],
         "the model has no input 'picture'; its inputs are tokens, mask, image."),
        ("tokens", None, "input 'tokens' is missing; give all of tokens, mask, image."),
        ("tokens", GOOD["tokens"].astype(np.int32),
         "input 'tokens' is int32, the model takes int64; convert it first."),
        ("image", GOOD["image"].astype(np.float64),
         "input 'image' is float64, the model takes float32; convert it first."),
        ("image", np.zeros((2, 1, 3), np.float32),
         "input 'image' has shape (2, 1, 3), the model takes (batch, 3); give it 2 axes."),
        ("image", np.zeros((2, 4), np.float32),
         "input 'image' has 4 on axis 1, the model takes (batch, 3);"
         " give it 3 there, or export that axis as dynamic."),
        ("mask", np.zeros((2, 6), np.bool_),
         "'length' is 5 in input 'tokens' and 6 in 'mask'; give both the same size."),
        ("image", np.zeros((1, 3), np.float32),
         "'batch' is 2 in input 'tokens' and 1 in 'image'; give both the same size."),
    ],
)  # fmt: skip
def test_an_input_that_does_not_fit_is_named(
    name: str, array: np.ndarray | None, sentence: str
) -> None:
    inputs = {**GOOD, name: array}
    given = {key: value for key, value in inputs.items() if value is not None}
    with pytest.raises(UsageError) as raised:
        check_inputs(SPECS, given)
    assert str(raised.value) == sentence
