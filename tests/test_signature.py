"""What a factory returned becomes inputs, outputs and dynamic axes with names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_export.errors import ExportError, UsageError
from attn_export.models.spec import Axis, ExportSpec
from attn_export.signature import (
    bind,
    default_dynamic,
    describe,
    parse_dynamic,
    parse_input,
    read_dynamic,
)
from attn_export.source import resolve


class Two(nn.Module):
    def forward(self, query: Tensor, mask: Tensor | None = None, **rest: Tensor) -> Tensor:
        return query


X, M = torch.ones(2, 3), torch.ones(2, 1)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (X, ["query"]),
        ((X, M), ["query", "mask"]),
        ([X, None], ["query"]),
        ({"mask": M, "query": X}, ["query", "mask"]),
        ({"query": X, "extra": M}, ["query", "extra"]),
    ],
)
def test_inputs_get_the_names_of_forward_in_its_order(given: Any, names: list[str]) -> None:
    assert list(bind("it", Two(), given)) == names


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ((X, M, M), "do not fit its forward (too many positional arguments)"),
        ({"mask": M}, "do not fit its forward (missing a required argument: 'query')"),
        ({"query": 3}, "input 'query' of it is int"),
        ({"query": [X]}, "input 'query' of it is list"),
        ({"query": None}, "it has no example inputs"),
        ({"query": X.bfloat16()}, "input 'query' of it is bfloat16; NumPy has no such type"),
    ],
)
def test_inputs_that_do_not_fit_are_named(given: Any, seen: str) -> None:
    with pytest.raises(ExportError) as raised:
        bind("it", Two(), given)
    assert seen in str(raised.value)


@pytest.mark.parametrize("made", [None, 3, "model", (), (X, Two()), (Two(), X, {}, {}, 1)])
def test_something_else_than_a_model_is_named(made: Any) -> None:
    with pytest.raises(ExportError, match=f"returned {type(made).__name__} instead of a model"):
        describe("it", made)


def test_a_spec_is_taken_as_it_is() -> None:
    spec = ExportSpec(Two(), {"query": X})
    assert describe("it", spec) is spec


def test_a_module_without_inputs_is_told_both_ways_out() -> None:
    with pytest.raises(ExportError) as raised:
        describe("it", Two())
    assert "without example inputs; return (module, example_inputs), or give --input" in str(
        raised.value
    )


def test_input_options_serve_a_module_without_inputs() -> None:
    spec = describe("it", Two(), ["query=float16[2,3]", "mask=bool[2]"])
    assert {n: (t.dtype, tuple(t.shape)) for n, t in spec.inputs.items()} == {
        "query": (torch.float16, (2, 3)),
        "mask": (torch.bool, (2,)),
    }


@pytest.mark.parametrize("attribute", ["example_inputs", "example_input_array", "dummy_inputs"])
@pytest.mark.parametrize("value", [X, lambda: X])
def test_inputs_that_a_module_carries_are_found(attribute: str, value: Any) -> None:
    module = Two()
    object.__setattr__(module, attribute, value)
    assert describe("it", module).inputs == {"query": X}


@pytest.mark.parametrize(
    "option",
    ["image", "image=float32", "image=float31[2]", "image=nn[2]", "=float32[2]", "image=float32[a]",
     "image=float32[-1]"],
)  # fmt: skip
def test_a_malformed_input_option_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match="does not parse; write image="):
        parse_input(option)


def test_examples_of_integers_hold_zeros_and_ones_and_repeat() -> None:
    (_, first), (_, again) = (parse_input("ids=int64[4, 50]") for _ in range(2))
    assert set(first.flatten().tolist()) == {0, 1}
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("option", "parsed"),
    [
        ("image=0:1..64", ("image", 0, Axis("batch", 1, 64))),
        ("image=2:8..9", ("image", 2, Axis("image_2", 8, 9))),
        ("key=1:length:1..9", ("key", 1, Axis("length", 1, 9))),
    ],
)
def test_dynamic_options(option: str, parsed: tuple[str, int, Axis]) -> None:
    assert parse_dynamic(option) == parsed


@pytest.mark.parametrize(
    "option",
    ["image", "image=0", "image=0:1", "image=a:1..2", "image=0:0..2", "image=0:3..2",
     "image=0:2..2", "image=-1:1..2"],
)  # fmt: skip
def test_a_malformed_dynamic_option_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match="does not parse; write image="):
        parse_dynamic(option)


@pytest.mark.parametrize(
    ("option", "seen"),
    [
        ("picture=0:1..2", "has no input 'picture'; its inputs are image"),
        ("image=4:1..2", "'image' has 4 axes; count axes from 0"),
        ("image=0:4..8", "the example input has 2 there; give a range with it inside"),
    ],
)
def test_a_dynamic_option_that_fits_no_input_is_refused(option: str, seen: str) -> None:
    with pytest.raises(UsageError) as raised:
        resolve("vit-digits", dynamic=[option])
    assert seen in str(raised.value)


@pytest.mark.parametrize(
    ("given", "axes"),
    [
        ({"x": {1: "length"}}, {1: Axis("length", 1, 1024)}),
        ({"x": {1: (2, 8)}}, {1: Axis("x_1", 2, 8)}),
        ({"x": {-1: (2, 8)}}, {1: Axis("x_1", 2, 8)}),
        ({"x": {0: torch.export.Dim("n", min=2, max=5)}}, {0: Axis("n", 2, 5)}),
        ({"x": {0: torch.export.Dim("n")}}, {0: Axis("n", 1, 1024)}),
        ({"x": {0: torch.export.Dim.DYNAMIC}}, {0: Axis("batch", 1, 1024)}),
        ({"x": ["n", None]}, {0: Axis("n", 1, 1024)}),
        (({1: "length"},), {1: Axis("length", 1, 1024)}),
    ],
)
def test_dynamic_axes_may_be_names_ranges_or_dims(given: Any, axes: dict[int, Axis]) -> None:
    assert read_dynamic("it", {"x": X}, given) == {"x": axes}


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"y": {0: "n"}}, "declares 'y' dynamic, which is not an input"),
        ({"x": {0: 3.5}}, "declares axis 0 of 'x' as 3.5"),
        ({"x": {2: "n"}}, "declares axis 2 of 'x' dynamic, which has 2 axes"),
        ({"x": {-3: "n"}}, "declares axis -3 of 'x' dynamic, which has 2 axes"),
        ({"x": {"n": 1}}, "declares axis n of 'x' dynamic, which has 2 axes"),
        ({"x": {0: (5, 2)}}, "declares axis 0 of 'x' as (5, 2)"),
        ({"x": {0: (2, 2)}}, "declares axis 0 of 'x' as (2, 2)"),
        ({"x": {0: ("a", "b")}}, "declares axis 0 of 'x' as ('a', 'b')"),
        ({"x": 3}, "declares 'x' dynamic as 3"),
        (3, "declares dynamic axes as 3"),
    ],
)
def test_dynamic_axes_that_cannot_be_are_named(given: Any, seen: str) -> None:
    with pytest.raises(ExportError) as raised:
        read_dynamic("it", {"x": X}, given)
    assert seen in str(raised.value)


def test_the_batch_is_dynamic_where_all_inputs_agree_on_it() -> None:
    scalar = torch.tensor(1.0)
    assert list(default_dynamic({"x": X, "m": M, "s": scalar})) == ["x", "m"]
    assert default_dynamic({"x": X, "other": torch.ones(5, 3)}) == {}
