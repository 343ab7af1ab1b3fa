"""Only the tokens that reach an output are computed; nothing moves where the others do."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from attn_export.attention.lowering import lower
from attn_export.bench.products import count_model
from tests.attention.work.graphs import (
    HEADS,
    SIZES,
    TOKENS,
    WIDTH,
    assert_equal,
    block,
    inputs_of,
    lowered,
    run,
)

FIRST = "i = Constant<value_int = 0>() z = Gather<axis = 1>(y, i)"
LAST = "i = Constant<value_int = -1>() z = Gather<axis = 1>(y, i)"
ROW = f"float[batch, {WIDTH}] z"


def flops(model: ir.Model, batch: int = 1) -> int:
    shapes = {name: array.shape for name, array in inputs_of(model, batch).items()}
    return count_model(ir.to_proto(model), shapes).flops


def test_a_class_tokens_block_is_computed_for_it_alone() -> None:
    """Keys and values of 5 tokens; query, output projection and MLP of one."""
    before = block(FIRST, ROW)
    after, account = lowered(before)
    (work,) = account.work
    assert (work.applied, work.saves) == (True, "3 MatMul, 1 Attention for row 0 alone")
    assert_equal(before, after)
    whole = TOKENS * (4 * WIDTH**2 + 2 * WIDTH * 16) + 2 * TOKENS**2 * WIDTH
    kept = TOKENS * 2 * WIDTH**2 + 2 * WIDTH**2 + 2 * WIDTH * 16 + 2 * TOKENS * WIDTH
    assert (flops(before), flops(after)) == (2 * whole, 2 * kept)


def test_the_site_keeps_its_name_and_is_counted_once() -> None:
    before = block(FIRST, ROW)
    (node,) = [node for node in before.graph if node.op_type == "Attention"]
    node.name = "blocks.0.attn"
    _, account = lowered(before)
    (outcome,) = account.outcomes
    assert (account.total, account.lowered, account.unrecognised) == (1, 1, ())
    assert (outcome.site.name, outcome.site.tokens) == ("blocks.0.attn", (1, TOKENS))
    assert account.to_json()["work"][0]["kind"] == "fewer-tokens"


def test_no_scores_give_the_class_token_the_mean_of_the_values() -> None:
    """Wq = 0, Wv and the projection the identity: the token plus the mean of all normed ones."""
    before = block("i = Constant<value_int = 0>() z = Gather<axis = 1>(h, i)", ROW)
    for name, array in (("wq", np.zeros((WIDTH, WIDTH))), ("wv", np.eye(WIDTH)),
                        ("proj", np.eye(WIDTH)), ("norm", np.ones(WIDTH))):  # fmt: skip
        before.graph.initializers[name].const_value = ir.tensor(array.astype(np.float32))
    after, account = lowered(before)
    assert account.work[0].applied
    x = np.float32(np.arange(2 * TOKENS * WIDTH).reshape(2, TOKENS, WIDTH))
    # Each row of eight consecutive numbers has the same normed values, so their mean is one's.
    normed = (np.arange(8) - 3.5) / np.sqrt(5.25 + 1e-5)
    assert np.allclose(run(after, {"x": x})["z"], x[:, 0] + normed, atol=1e-4)


@pytest.mark.parametrize(
    ("tail", "outputs"),
    [
        (FIRST, f"{ROW}, float[batch, {TOKENS}, {WIDTH}] y"),
        (FIRST + " w = ReduceMean<keepdims = 0>(y, one)", f"{ROW}, float[batch, {WIDTH}] w"),
        (FIRST + " w = Transpose<perm = [0, 2, 1]>(y)", f"{ROW}, float[batch, 8, 5] w"),
    ],
    ids=["hidden states are an output", "their mean is", "they are, transposed"],
)
def test_nothing_moves_where_the_other_tokens_reach_an_output(tail: str, outputs: str) -> None:
    before = block("one = Constant<value_ints = [1]>() " + tail, outputs)
    after, account = lowered(before)
    assert account.work == ()
    assert account.outcomes[0].site.tokens == (TOKENS, TOKENS)
    assert_equal(before, after)


def test_nothing_moves_where_the_body_of_an_if_reads_the_other_tokens() -> None:
    tail = (
        FIRST
        + """ w = If(flag) <
        then_branch = yes () => (float[b, 5, 8] t) { t = Identity(y) },
        else_branch = no () => (float[b, 5, 8] f) { f = Neg(y) }>"""
    )
    before = block(tail, f"{ROW}, float[batch, 5, 8] w", inputs=", bool[1] flag")
    _, account = lowered(before)
    assert account.work == ()


def test_two_tokens_are_computed_together() -> None:
    """A distilled classifier reads its class token and its distillation token."""
    tail = FIRST + " j = Constant<value_int = 1>() w = Gather<axis = 1>(y, j)"
    before = block(tail, f"{ROW}, float[batch, {WIDTH}] w")
    after, account = lowered(before)
    (work,) = account.work
    assert (work.applied, work.saves) == (True, "3 MatMul, 1 Attention for rows 0, 1 alone")
    assert account.outcomes[0].site.tokens == (2, TOKENS)
    assert_equal(before, after)


@pytest.mark.parametrize(
    ("start", "end", "rows"),
    [(0, 1, 1), (1, 3, 2), (-1, 2**63 - 1, 1), (-2, -1, 1), (3, 2**31 - 1, 0)],
)
def test_slices_are_selections_too(start: int, end: int, rows: int) -> None:
    """A few tokens whose number is known; none are taken for known where the end is open."""
    tail = f"""s = Constant<value_ints = [{start}]>() e = Constant<value_ints = [{end}]>()
        o = Constant<value_ints = [1]>() z = Slice(y, s, e, o)"""
    before = block(tail, f"float[batch, n, {WIDTH}] z")
    after, account = lowered(before)
    assert [work.applied for work in account.work] == ([True] if rows else [])
    assert account.outcomes[0].site.query_tokens == (rows or TOKENS)
    assert_equal(before, after)


def test_the_last_token_of_a_causal_block_sees_every_key() -> None:
    before = block(LAST, ROW, causal=1)
    after, account = lowered(before)
    assert [work.applied for work in account.work] == [True]
    assert account.outcomes[0].site.tokens == (1, TOKENS)
    assert_equal(before, after)


def test_an_earlier_token_of_a_causal_block_does_not() -> None:
    """Its MLP and projection are computed for it alone, the attention for all."""
    before = block(FIRST, ROW, causal=1)
    after, account = lowered(before)
    (work,) = account.work
    assert (work.applied, work.saves) == (True, "3 MatMul for row 0 alone")
    assert account.outcomes[0].site.tokens == (TOKENS, TOKENS)
    assert_equal(before, after)


@pytest.mark.parametrize("queries", [1, TOKENS])
def test_a_mask_gives_the_rows_of_its_queries(queries: int) -> None:
    """With holes, and a query that may see no key."""
    inputs = f", bool[batch, 1, {queries}, {TOKENS}] given"
    expand = f"t = Constant<value_ints = [1, 1, {TOKENS}, 1]>() mask = Expand(given, t)"
    before = block(FIRST, ROW, inputs=inputs, mask=", mask", query="qs = Identity(q) " + expand)
    after, account = lowered(before)
    assert [work.applied for work in account.work] == [True]
    assert account.outcomes[0].site.tokens == (1, TOKENS)
    assert_equal(before, after)


def test_an_additive_mask_gives_the_rows_of_its_queries() -> None:
    """Numbers for each pair of tokens, with either way to block a key."""
    inputs = f", float[batch, {HEADS}, {TOKENS}, {TOKENS}] given"
    before = block(FIRST, ROW, inputs=inputs, mask=", given")
    after, account = lowered(before)
    assert [work.applied for work in account.work] == [True]
    drawn = inputs_of(before, 2)
    given = drawn["given"].copy()
    given[:, :, 0, 1], given[:, 1, 0, 3] = -np.inf, np.finfo(np.float32).min
    drawn["given"] = given
    expected = run(before, drawn, optimize=False)["z"]
    assert np.allclose(run(after, drawn)["z"], expected, atol=1e-4)


def test_more_than_half_of_the_tokens_are_not_few() -> None:
    tail = "i = Constant<value_ints = [0, 1, 3]>() z = Gather<axis = 1>(y, i)"
    _, account = lowered(block(tail, f"float[batch, 3, {WIDTH}] z"))
    assert account.work == ()


def test_queries_that_are_no_plain_projection_are_taken_as_they_are() -> None:
    """A factor for each token, as rotary embedding has: its rows are taken with the token's."""
    before = block(FIRST, ROW, query="qs = Mul(q, n)")
    after, account = lowered(before)
    assert [work.applied for work in account.work] == [True]
    assert account.outcomes[0].site.tokens == (1, TOKENS)
    assert_equal(before, after)


def test_a_row_of_the_batch_stops_at_attention() -> None:
    """Rows of the batch are no tokens; the MLP behind is computed for the one that is read."""
    before = block("i = Constant<value_int = 0>() z = Gather<axis = 0>(y, i)",
                   f"float[{TOKENS}, {WIDTH}] z")  # fmt: skip
    after, account = lowered(before)
    assert [work.saves for work in account.work] == ["3 MatMul for row 0 alone"]
    assert account.outcomes[0].site.tokens == (TOKENS, TOKENS)
    assert_equal(before, after)


def test_work_is_kept_where_it_was_not_measured_and_where_that_is_asked_for() -> None:
    for runtime, less_work, reason in (("ort-cuda", True, "it was not measured on ort-cuda"),
                                       ("ort-cpu", False, "--keep-work")):  # fmt: skip
        before = block(FIRST, ROW)
        account = lower(before, runtime, SIZES, less_work=less_work)
        (work,) = account.work
        assert (work.applied, work.reason) == (False, reason)
        assert account.outcomes[0].site.tokens == (TOKENS, TOKENS)
