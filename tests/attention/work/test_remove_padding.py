"""Padding that is declared not to count is not computed; nothing that counts may change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_export.attention.lowering import lower
from attn_export.attention.padding import declare
from attn_export.errors import UsageError
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import Session
from tests.attention.work.encoders import (
    EMBEDDING,
    KEEP,
    MEAN,
    SIZES,
    STATES,
    WIDTH,
    WRITTEN,
    encoder,
    inputs_of,
    lowered,
    run,
    set_weights,
)

SENTENCE = f"float[batch, {WIDTH}] z"


def applied(model: ir.Model, **options: int) -> ir.Model:
    after, account = lowered(model, **options)
    assert [(work.kind, work.applied, work.reason) for work in account.work] == [
        ("padding", True, ""), ("padding-of-all-rows", True, ""),
    ]  # fmt: skip
    return after


def assert_same(before: ir.Model, after: ir.Model, keeps: int = 1) -> None:
    """Rows of several lengths, all full, all of one token, one alone; batch 1, 2 and 3."""
    plain, _ = lowered(before, keeps=keeps, remove=False)
    for lengths, tokens in (((2, 5, 1), 6), ((4, 4), 4), ((1, 1, 1), 5), ((3,), 3), ((3, 2), 9)):
        inputs = inputs_of(lengths, tokens)
        if not keeps:
            inputs["mask"] = inputs["mask"] == 0
        expected, found = run(plain, inputs), run(after, inputs)
        kept = np.arange(tokens) < np.array(lengths)[:, None]
        assert list(found) == list(expected)
        for name, array in expected.items():
            assert found[name].shape == array.shape
            per_token = array.shape[:2] == kept.shape and array.ndim == 3
            where = kept if per_token else ...
            np.testing.assert_allclose(found[name][where], array[where], atol=2e-5)
            if per_token:
                assert not found[name][~kept].any()


def test_each_token_gets_the_mean_of_the_values_that_count() -> None:
    """No scores, values and projection the identity, no positions: x plus the mean of normed x."""
    before = encoder("", f"float[batch, tokens, {WIDTH}] h")
    square, slope = np.zeros((WIDTH, WIDTH)), np.linspace(-1, 1, WIDTH)
    set_weights(before, wq=square, b=np.zeros(WIDTH), wv=np.eye(WIDTH), proj=np.eye(WIDTH),
                places=np.zeros((17, WIDTH)), norm=np.ones(WIDTH),
                table=np.arange(-5, 6)[:, None] * slope)  # fmt: skip
    ids = np.array([[6, 7, 1, 9], [4, 6, 7, 9]])  # +1, +2 | padding; -1, +1, +2, +4
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
    h = run(applied(before), {"ids": ids, "mask": mask})["h"]
    unit = slope / np.sqrt((slope**2).mean())  # normed, whatever its size; only its sign is left
    first = np.array([1, 2])[:, None] * slope + unit
    second = np.array([-1, 1, 2, 4])[:, None] * slope + unit * (3 - 1) / 4
    np.testing.assert_allclose(h[0], [*first, *np.zeros((2, WIDTH))], atol=1e-4)
    np.testing.assert_allclose(h[1], second, atol=1e-4)


@pytest.mark.parametrize(
    ("tail", "outputs"),
    [
        ("", f"{STATES} y"),
        (MEAN, SENTENCE),
        (MEAN, f"{SENTENCE}, {STATES} y"),
        ("first = Constant<value_int = 0>() z = Gather<axis = 1>(y, first)", SENTENCE),
        ("first = Constant<value_int = 0>() z = Gather<axis = 1>(y, first)",
         f"{SENTENCE}, {STATES} y"),
        ("back = Neg(y)", f"{STATES} back, {STATES} x"),
    ],
    ids=["states", "mean", "mean and states", "first token", "first token, states", "embeddings"],
)  # fmt: skip
def test_what_counts_is_what_it_was(tail: str, outputs: str) -> None:
    before = encoder(tail, outputs)
    after, account = lowered(before)
    assert {w.kind for w in account.work if w.applied} >= {"padding", "padding-of-all-rows"}
    assert all(outcome.status == "lowered" for outcome in account.outcomes)
    assert_same(before, after)


PAIRED = """
    joined = Concat<axis = -1>(wq, wk, wv)
    three = MatMul(n, joined)
    q, k, v = Split<axis = -1, num_outputs = 3>(three)
"""


def test_one_projection_of_queries_keys_and_values_is_split_behind_attention() -> None:
    before = encoder("", f"{STATES} y", qkv=PAIRED)
    after = applied(before)
    assert_same(before, after)
    (split,) = [node for node in after.graph if node.op_type == "Split"]
    behind = [node.op_type for node in after.graph if split.inputs[0] in node.outputs]
    assert behind == ["Gather"]


OTHERS = """
    words0 = Add(words, row)
    words1 = Mul(words0, place)
    words2 = Where(chosen, words1, token)
    words3 = Add(words2, table_of_places)
    x = Add(words3, number)
"""


def test_operands_that_are_broadcast_are_gathered() -> None:
    """One row for each text, one for each position, one for each token, one number."""
    names = f"float[batch, 1, {WIDTH}] row, float[1, tokens, 1] place, {STATES} token"
    names += f", float[tokens, {WIDTH}] table_of_places"
    kinds = f"{names}, bool[batch, tokens, 1] chosen, float number"
    embedding = EMBEDDING.replace("x = Add(words, positions)", OTHERS)
    before = encoder("", f"{STATES} y", embedding=embedding, inputs=f", {kinds}")
    after = applied(before)
    plain, _ = lowered(before, remove=False)
    rng, lengths, tokens = np.random.default_rng(1), (3, 1, 4), 6
    inputs = inputs_of(lengths, tokens) | {
        "row": rng.standard_normal((3, 1, WIDTH)).astype(np.float32),
        "place": rng.standard_normal((1, tokens, 1)).astype(np.float32),
        "token": rng.standard_normal((3, tokens, WIDTH)).astype(np.float32),
        "table_of_places": rng.standard_normal((tokens, WIDTH)).astype(np.float32),
        "chosen": rng.random((3, tokens, 1)) > 0.5,
        "number": np.array(0.3, np.float32),
    }
    kept = inputs["mask"] == 1
    expected, found = run(plain, inputs)["y"], run(after, inputs)["y"]
    np.testing.assert_allclose(found[kept], expected[kept], atol=2e-5)


def test_attention_written_by_hand() -> None:
    before = encoder(MEAN, f"{SENTENCE}, {STATES} y", attention=WRITTEN)
    assert_same(before, applied(before))


def test_a_mask_of_truth_values_that_blocks() -> None:
    before = encoder(MEAN, f"{SENTENCE}, {STATES} y", mask="bool", masking="keep = Not(mask)")
    assert_same(before, applied(before, keeps=0), keeps=0)


def test_products_see_the_tokens_that_count_and_attention_the_longest_row() -> None:
    after = applied(encoder("", f"{STATES} y"))
    (attention,) = [node for node in after.graph if "Attention" in node.op_type]
    products = [node for node in after.graph if node.op_type == "MatMul"]
    (embedded,) = [n for n in after.graph if n.inputs and n.inputs[0].name == "table"]
    seen = [attention.inputs[0], products[0].inputs[0], products[-1].inputs[0], embedded.outputs[0]]
    assert len(products) == 6
    after.graph.outputs.extend(value for value in seen if value is not None)
    found = list(run(after, inputs_of((2, 5, 1), 9)).values())
    shapes = [array.shape for array in found]
    assert shapes == [(3, 9, 8), (3, 5, 8), (1, 8, 8), (1, 8, 16), (1, 8, 8)]


@pytest.mark.parametrize(
    ("tail", "outputs"),
    [
        ("z = ReduceMean<keepdims = 0>(y, one)", SENTENCE),
        ("z = ReduceMax<keepdims = 0>(y, one)", SENTENCE),
        ("t = Transpose<perm = [0, 2, 1]>(y)", f"float[batch, {WIDTH}, tokens] t"),
        ("end = Constant<value_int = -1>() z = Gather<axis = 1>(y, end)", SENTENCE),
        ("z = ReduceMean<keepdims = 0>(x, one)", f"{SENTENCE}, {STATES} y"),
    ],
    ids=["mean of all", "maximum of all", "transposed", "last token", "mean of embeddings"],
)
def test_padding_that_an_output_depends_on_is_kept(tail: str, outputs: str) -> None:
    before = encoder(tail, outputs)
    after, account = lowered(before)
    padding = [work for work in account.work if work.kind.startswith("padding")]
    name = "t" if outputs.endswith(" t") else "z"
    assert [work.applied for work in padding] == [False, False]
    assert all(f"'{name}' depends on padding" in work.reason for work in padding)
    plain, _ = lowered(before, remove=False)
    assert [n.op_type for n in after.graph] == [n.op_type for n in plain.graph]
    inputs = inputs_of((2, 5, 1), 6)
    for name, array in run(plain, inputs).items():
        np.testing.assert_array_equal(run(after, inputs)[name], array)


def test_attention_that_sees_padding_keeps_it() -> None:
    """The mask is not given to attention."""
    before = encoder("", f"{STATES} y", masking=KEEP.replace("mask", "unused"),
                     inputs=", int64[batch, tokens] unused")  # fmt: skip
    _, account = lowered(before)
    assert [work.applied for work in account.work] == [False, False]


def test_a_fixed_length_is_packed_and_not_cut() -> None:
    embedding = "x = Gather(table, ids)"
    before = encoder("", f"float[batch, 6, {WIDTH}] y", tokens="6", embedding=embedding)
    after = before.clone()
    declare(after, {"mask": 1}, ["mask"])
    account = lower(after, ort_cpu.NAME, [{"batch": 1}, {"batch": 3}])
    packed, cut = account.work
    assert packed.applied
    assert (cut.applied, cut.reason) == (False, "the length of 'mask' is fixed at 6, not dynamic")
    plain = before.clone()
    lower(plain, ort_cpu.NAME, [{"batch": 3}])
    inputs = inputs_of((2, 6, 1), 6)
    kept = inputs["mask"] == 1
    expected, found = run(plain, inputs)["y"], run(after, inputs)["y"]
    np.testing.assert_allclose(found[kept], expected[kept], atol=2e-5)


def test_it_is_kept_where_it_was_not_measured_or_not_wanted() -> None:
    before = encoder("", f"{STATES} y")
    for runtime, less_work, why in (("ort-cuda", True, ""), ("ort-cpu", False, ""),
                                    ("ort-cpu", True, "ONNX Runtime differs")):  # fmt: skip
        model = before.clone()
        declare(model, {"mask": 1}, ["mask"])
        account = lower(model, runtime, SIZES, less_work=less_work, padding_left=why)
        reason = why or ("it was not measured on ort-cuda" if less_work else "--keep-work")
        assert {(work.applied, work.reason) for work in account.work} == {(False, reason)}
        assert not any(node.op_type == "NonZero" for node in model.graph)


def test_a_row_without_any_token_gets_zeros_and_changes_no_other() -> None:
    """A bundle refuses it; in a file that `fuse` wrote nothing does."""
    after = applied(encoder(MEAN, f"{SENTENCE}, {STATES} y"))
    inputs = inputs_of((0, 3), 5)
    found = run(after, inputs)
    alone = run(after, {name: array[1:] for name, array in inputs.items()})
    assert not found["y"][0].any()
    np.testing.assert_allclose(found["y"][1:], alone["y"], atol=1e-6)
    np.testing.assert_allclose(found["z"][1:], alone["z"], atol=1e-6)


def test_one_mask_says_what_padding_is() -> None:
    model = encoder("", f"{STATES} y", inputs=", int64[batch, tokens] other")
    with pytest.raises(UsageError, match="--remove-padding names 2 inputs, mask, other"):
        declare(model, {"mask": 1, "other": 1}, ["mask", "other"])


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Session, Session]]:
    before = encoder(MEAN, f"{SENTENCE}, {STATES} y")
    plain, _ = lowered(before, remove=False)
    data = [ir.to_proto(model).SerializeToString() for model in (plain, applied(before))]
    with ort_cpu.load(data[0], 1) as one, ort_cpu.load(data[1], 1) as other:
        yield one, other


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=5),
    behind=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_any_lengths_and_any_padding(
    sides: tuple[Session, Session], lengths: list[int], behind: int, seed: int
) -> None:
    tokens = min(16, max(lengths) + behind)
    inputs = inputs_of(lengths, tokens, seed)
    expected, found = (side.run(inputs) for side in sides)
    kept = inputs["mask"] == 1
    np.testing.assert_allclose(found["z"], expected["z"], atol=2e-5)
    np.testing.assert_allclose(found["y"][kept], expected["y"][kept], atol=2e-5)
    assert not found["y"][~kept].any()
