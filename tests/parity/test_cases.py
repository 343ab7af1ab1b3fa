"""The runs that a bundle stores: their sizes, their inputs, and the truth beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export.errors import ExportError
from attn_export.models.decoder_lm import DecoderLMConfig, components
from attn_export.models.spec import Axis, ExportSpec
from attn_export.parity import cases
from attn_export.parity.cases import build_cases
from attn_export.parity.drawing import cache_bytes, draw, ends_of, is_mask, sizes_of
from attn_export.parity.tolerance import Group


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def spec(module: nn.Module | None = None, **values: object) -> ExportSpec:
    given = {"inputs": {"x": torch.ones(2, 8)}, "outputs": ("y",), **values}
    return ExportSpec(module=(module or Scale()).eval(), **given)


def test_batches_of_1_and_3_come_beside_the_examples_own() -> None:
    made = spec(dynamic={"x": {0: Axis("batch", 1, 64), 1: Axis("length", 2, 9)}})
    assert sizes_of(made) == [
        {"batch": 1, "length": 4},
        {"batch": 3, "length": 9},
        {"batch": 2, "length": 8},
    ]


def test_sizes_stay_inside_of_the_declared_range() -> None:
    made = spec(dynamic={"x": {0: Axis("batch", 2, 2), 1: Axis("length", 8, 16)}})
    assert sizes_of(made) == [{"batch": 2, "length": 8}, {"batch": 2, "length": 10}]


def test_without_dynamic_axes_there_is_one_case() -> None:
    cases, _ = build_cases("model", spec(), {})
    assert [case.name for case in cases] == ["fixed sizes"]


def test_redrawn_inputs_keep_to_the_examples_values_and_repeat() -> None:
    made = spec(inputs={"x": torch.tensor([[3, 5, 7]])}, dynamic={"x": {0: Axis("batch", 1, 9)}})
    first, again = (draw(made, {"batch": 9}, False, seed=4)["x"] for _ in range(2))
    assert first.shape == (9, 3)
    assert set(first.flatten().tolist()) <= {3, 5, 7}
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("attention_mask", torch.tensor([1, 0]), True),
        ("attention_mask", torch.tensor([1, 2]), False),
        ("attention_mask", torch.tensor([1.0, 0.0]), False),
        ("tokens", torch.tensor([1, 0]), False),
        ("keep", torch.tensor([True]), True),
    ],
)
def test_what_a_mask_is(name: str, value: Tensor, expected: bool) -> None:
    assert is_mask(name, value) is expected


@pytest.mark.parametrize("usual", [True, False])
def test_a_masked_draw_has_holes_and_blocks_no_row(usual: bool) -> None:
    made = spec(inputs={"mask": torch.full((64, 4), usual)})
    assert bool((draw(made, {}, False, 0)["mask"] == usual).all())
    masked = draw(made, {}, True, 0)["mask"]
    assert 0 < int((masked != usual).sum()) < 192
    assert bool((masked[:, 0] == usual).all())


def test_the_truth_is_computed_in_double_and_the_module_stays_float() -> None:
    module = Scale()
    cases, note = build_cases("model", spec(module), {})
    (case,) = cases
    assert note == ""
    assert case.outputs["y"].dtype == np.float32
    assert case.truth["y"].dtype == np.float64
    np.testing.assert_array_equal(case.truth["y"], np.float64(np.float32(1 / 3)))
    assert module.weight.dtype == torch.float32


def test_a_model_that_refuses_double_has_no_truth_and_says_so() -> None:
    class FloatOnly(Scale):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is not torch.float32:
                raise TypeError("float32 only")
            return super().forward(x)

    (case,), note = build_cases("model", spec(FloatOnly()), {})
    assert case.truth == {}
    assert note.startswith("no float64 truth: the model raised TypeError")
    third = np.float64(np.float32(1 / 3))
    assert case.allowed["y"]["all"] == pytest.approx(64 * 2**-23 * third, rel=1e-12)


def test_each_group_has_an_allowance_of_its_own() -> None:
    x = torch.tensor([[512.0, 512.0, 0.5, 0.5]])
    groups = {"y": [Group("boxes", 1, 0, 2), Group("scores", 1, 2, 4)]}
    made = spec(nn.Identity(), inputs={"input": x}, draw=lambda *_: {"input": x})
    (case,), _ = build_cases("model", made, groups)
    assert case.allowed["y"] == {"boxes": 64 * 2**-23 * 512, "scores": 64 * 2**-23 * 0.5}


def test_groups_that_miss_part_of_an_output_are_refused() -> None:
    with pytest.raises(ExportError, match="groups left do not cover"):
        build_cases("model", spec(), {"y": [Group("left", 1, 0, 4)]})


def test_an_output_that_numpy_cannot_hold_is_named() -> None:
    class Half(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).bfloat16()

    with pytest.raises(ExportError, match="output 'y' is bfloat16"):
        build_cases("model", spec(Half()), {})


def test_a_size_that_the_model_refuses_is_named() -> None:
    class Two(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(2, 8))

    made = spec(Two(), dynamic={"x": {0: Axis("batch", 1, 8)}})
    with pytest.raises(ExportError, match=r"raised RuntimeError on x \(1, 8\)"):
        build_cases("model", made, {})


def test_two_lengths_are_also_crossed() -> None:
    """So that queries outnumber keys in one case, and keys queries in another."""
    axes = {0: Axis("batch", 1, 9), 1: Axis("queries", 1, 99), 2: Axis("keys", 1, 99)}
    sizes = sizes_of(ExportSpec(Scale(), {"x": torch.zeros(2, 6, 6)}, {"x": axes}))
    assert {"batch": 3, "queries": 8, "keys": 3} in sizes
    assert sizes[-1] == {"batch": 2, "queries": 6, "keys": 6}


def test_both_ends_of_the_declared_lengths_are_run() -> None:
    made = spec(dynamic={"x": {0: Axis("batch", 1, 64), 1: Axis("length", 2, 900)}})
    ends = [{"batch": 1, "length": 2}, {"batch": 1, "length": 900}]
    assert ends_of(made) == (ends, "")
    cases, note = build_cases("model", made, {})
    assert [case.inputs["x"].shape for case in cases[-2:]] == [(1, 2), (1, 900)]
    assert note == ""


def test_ends_that_are_too_large_are_told() -> None:
    axes = {0: Axis("batch", 1, 64), 1: Axis("height", 8, 64), 2: Axis("width", 8, 64)}
    made = spec(inputs={"x": torch.ones(2, 16, 16)}, dynamic={"x": axes})
    ends, note = ends_of(made)
    assert ends == []  # the smallest are among the sizes that are run anyway
    assert "(height=64 width=64) were not run" in note


def test_an_end_that_pytorch_refuses_is_told_and_is_no_error() -> None:
    class Short(Scale):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > 100:
                raise ValueError("too long")
            return super().forward(x)

    made = spec(Short(), dynamic={"x": {1: Axis("length", 2, 900)}})
    cases, note = build_cases("model", made, {})
    assert "PyTorch itself does not run at length=900, which is declared" in note
    assert [case.name for case in cases] == ["length=4", "length=10", "length=8", "length=2"]


def test_the_empty_cache_of_a_first_step_is_run() -> None:
    made = spec(inputs={"x": torch.ones(2, 8), "past": torch.ones(2, 3)}, outputs=("y",))
    made.module = Joined()
    made.dynamic = {"past": {1: Axis("past", 0, 2000)}}
    cases, _ = build_cases("model", made, {})
    assert cases[-1].inputs["past"].shape == (2, 0)


class Joined(nn.Module):
    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        return torch.cat([past, x], dim=1)


def test_caches_of_a_long_past_are_stored_at_shorter_ones_too() -> None:
    """8 layers of 64 x 8 x 2048 keys and values are 134 MB for two rows, before any truth."""
    config = DecoderLMConfig(vocab=16, dim=512, layers=8, heads=8, kv_heads=8, hidden=32)
    spec = components(config)["decode"]
    assert spec.draw is not None
    past = Axis("past", 1, 4096)
    dynamic = {name: {i: past if axis.name == "past" else axis for i, axis in axes.items()}
               for name, axes in spec.dynamic.items()}  # fmt: skip
    drawn = spec.draw(torch.Generator(), {"batch": 2, "past": 2048}, False)
    spec = replace(spec, inputs=drawn, dynamic=dynamic)
    mask = 8  # bytes of a token, which is a state as well
    each = 8 * 2 * 8 * 64 * 4 + mask
    assert cache_bytes(spec, {"batch": 2, "past": 2048}) == 2 * 2048 * each
    # 16 MB over 3 rows are 162 tokens; the other cases lie on both sides of that.
    expected = [(1, 81), (3, 216), (2, 2048)]
    assert [(s["batch"], s["past"]) for s in sizes_of(spec)] == expected


def test_an_example_with_large_caches_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask with holes is left to the other sizes."""
    monkeypatch.setattr(cases, "CACHE_BYTES", 1)
    config = DecoderLMConfig(vocab=16, dim=16, layers=1, heads=2, kv_heads=1, hidden=16)
    stored = {case.name for case in build_cases("model", components(config)["decode"], {}, 0)[0]}
    assert "batch=2 past=6" in stored
    assert "batch=2 past=6 masked" not in stored
    assert {name for name in stored if name.startswith("batch=3") and name.endswith("masked")}
