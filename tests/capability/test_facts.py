"""What the table says of ONNX Runtime's CPU provider, and of it in WebAssembly, seen to be so.

Zero scores: a query gets the mean of the values 0, 1, 2, 3 that it may see.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from attn_export.capability import (
    CONTRIB_ATTENTION,
    CONTRIB_ROTARY,
    GROUP_QUERY_ATTENTION,
    LINEAR_ATTENTION,
    MULTI_HEAD_ATTENTION,
    STANDARD_ATTENTION,
    STANDARD_ROTARY,
    Form,
    blocked_row,
    why_not,
)
from attn_export.errors import FileError
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.packages import runtime_version
from tests.capability import nodes
from tests.capability.nodes import LOWEST, MICROSOFT, Array, Values, model, packed, run, standard
from tests.needed import needs

INF = np.inf
CPU_ALONE = pytest.mark.parametrize("runtime", ["ort-cpu"], indirect=True)


@pytest.fixture(autouse=True, params=["ort-cpu", pytest.param("ort-web", marks=needs("ort-web"))])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the nodes run on, and what the table is asked about."""
    monkeypatch.setattr(nodes, "RUNTIME", request.param)
    return str(request.param)


def refused(op: str, **features: Any) -> bool:
    version, _ = runtime_version(nodes.RUNTIME)
    return why_not(op, nodes.RUNTIME, version, Form(**features)) is not None


def blocked(op: str, way: Any) -> str:
    version, _ = runtime_version(nodes.RUNTIME)
    return blocked_row(op, nodes.RUNTIME, version, way)


def flat(array: Array) -> list[float]:
    return [float(number) for number in np.asarray(array, np.float64).ravel()]


def mha(inputs: Values, outputs: int = 1, **attributes: Any) -> Array:
    return run("MultiHeadAttention", inputs, outputs, domain=MICROSOFT, num_heads=1, **attributes)


def gqa(S: int, total: int, batch: int = 1, past: int = 0, T: int | None = None, heads: int = 1,
        size: int = 8, **attributes: Any) -> Array:  # fmt: skip
    """GroupQueryAttention of zero scores; past and new values count on from 0."""
    parts = packed(S, S if T is None else T, size, batch)
    parts["value"] = np.asarray(parts["value"]) + past
    old = np.broadcast_to(np.arange(past, dtype=np.float32).reshape(1, 1, past, 1),
                          (batch, 1, past, size)).copy()  # fmt: skip
    inputs: Values = {
        **parts,
        "past_key": np.zeros_like(old) if past else None,
        "past_value": old if past else None,
        "seqlens_k": np.full(batch, total - 1, np.int32),
        "total": np.array(total, np.int32),
    }
    return run("GroupQueryAttention", inputs, 3, domain=MICROSOFT, num_heads=heads,
               kv_num_heads=1, **attributes)  # fmt: skip


def test_the_version_is_the_installed_one(runtime: str) -> None:
    assert runtime_version(runtime)[1] is False


# com.microsoft.Attention


def contrib(mask: Array | None, tokens: int = 4, bias: bool = True, **attributes: Any) -> Array:
    """The input is the values; the weights make Q = K = 0 and V = input."""
    inputs: Values = {
        "x": np.arange(tokens, dtype=np.float32).reshape(1, tokens, 1),
        "weights": np.array([[0, 0, 1]], np.float32),
        "bias": np.zeros(3, np.float32) if bias else None,
        "mask": mask,
    }
    return run("Attention", inputs, domain=MICROSOFT, num_heads=1, **attributes)


@CPU_ALONE
def test_contrib_attention_without_a_bias_ends_the_process() -> None:
    script = "from tests.capability.test_facts import contrib; contrib(None, bias=False)"
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True)
    assert ended.returncode < 0  # killed by a signal


@pytest.mark.parametrize(
    "runtime", [pytest.param("ort-web", marks=needs("ort-web"))], indirect=True
)
def test_contrib_attention_without_a_bias_is_refused_in_webassembly() -> None:
    with pytest.raises(FileError, match="Input 'bias' is expected to have 1 dimension"):
        contrib(None, bias=False)


def test_contrib_attention_with_a_bias_is_right() -> None:
    assert flat(contrib(None)) == pytest.approx([1.5] * 4)
    assert flat(contrib(None, unidirectional=1)) == pytest.approx([0, 0.5, 1, 1.5])


def test_contrib_attention_refuses_a_mask_of_four_axes() -> None:
    with pytest.raises(FileError, match="4D mask"):
        contrib(np.ones((1, 1, 4, 4), np.int32))


def test_contrib_attention_reads_a_row_of_length_zero_as_unmasked() -> None:
    assert flat(contrib(np.zeros(1, np.int32))) == pytest.approx([1.5] * 4)
    assert blocked(CONTRIB_ATTENTION, "lengths") == "plain"
    assert refused(CONTRIB_ATTENTION, mask="lengths", blocked_rows=True)


# com.microsoft.MultiHeadAttention


@pytest.mark.parametrize(("S", "T", "result", "right"), [
    (2, 4, [0, 1.5], False),
    (4, 4, [0, 0.5, 1, 1.5], True),
    (4, 2, [0, 0.5, 0.5, 0.5], True),
])  # fmt: skip
def test_multi_head_attention_unmasks_its_last_query_below_t(
    S: int, T: int, result: list[float], right: bool
) -> None:
    """Upper-left is 0, 0.5 for 2 queries of 4 keys."""
    assert flat(mha(packed(S, T), unidirectional=1)) == pytest.approx(result)
    form = {"causal": "upper-left", "query_tokens": S, "key_tokens": T}
    assert refused(MULTI_HEAD_ATTENTION, **form) is not right


@pytest.mark.parametrize(("outputs", "right"), [(3, True), (1, False)])
def test_multi_head_attention_with_a_past_needs_its_three_outputs(
    outputs: int, right: bool
) -> None:
    """Past values 4 and 8, a new one 0: the mean is 4."""
    past = np.array([4, 8], np.float32).reshape(1, 1, 2, 1)
    inputs: Values = {
        **packed(1, 1), "bias": None, "padding": None, "attention_bias": None,
        "past_key": np.zeros((1, 1, 2, 1), np.float32), "past_value": past,
    }  # fmt: skip
    assert (flat(mha(inputs, outputs)) == pytest.approx([4.0])) is right


def biased(bias: Array, S: int = 2, T: int = 4) -> Array:
    return mha({**packed(S, T), "bias": None, "padding": None, "attention_bias": bias})


def test_multi_head_attention_does_not_broadcast_a_bias_over_queries() -> None:
    assert flat(biased(np.zeros((1, 1, 2, 4), np.float32))) == pytest.approx([1.5, 1.5])
    with pytest.raises(FileError, match="attention_bias"):
        biased(np.zeros((1, 1, 1, 4), np.float32))


def test_multi_head_attention_gives_nan_on_a_row_of_minus_infinity() -> None:
    bias = np.zeros((1, 1, 2, 4), np.float32)
    bias[..., 0, :] = -INF
    bias[..., 1, 2:] = -INF
    assert flat(biased(bias)) == pytest.approx([np.nan, 0.5], nan_ok=True)
    assert blocked(MULTI_HEAD_ATTENTION, "-inf") == "nan"
    assert refused(MULTI_HEAD_ATTENTION, mask="additive", blocked_rows=True)


def test_multi_head_attention_gives_the_mean_on_a_row_of_the_lowest_number() -> None:
    assert flat(biased(np.full((1, 1, 2, 4), LOWEST))) == pytest.approx([1.5, 1.5])
    assert blocked(MULTI_HEAD_ATTENTION, "lowest") == "mean"


def test_multi_head_attention_reads_padding_that_hides_all_as_unmasked() -> None:
    padding = {**packed(1, 4), "bias": None, "padding": np.zeros((1, 4), np.int32)}
    assert flat(mha(padding)) == pytest.approx([1.5])
    assert blocked(MULTI_HEAD_ATTENTION, "lengths") == "plain"


def test_multi_head_attention_takes_holes_in_integer_padding_and_no_bool() -> None:
    hole = np.array([[1, 0, 1, 0]])
    padding: Values = {**packed(1, 4), "bias": None, "padding": hole.astype(np.int32)}
    assert flat(mha(padding)) == pytest.approx([1.0])
    with pytest.raises(FileError, match="tensor\\(bool\\)"):
        mha({**padding, "padding": hole.astype(bool)})


def large(op: str, mask: Array, **attributes: Any) -> list[float]:
    """One query of score 40,000 with key 1, which is blocked, and 0 with key 0; values 0 and 1."""
    one = np.ones((1, 1, 1), np.float32)
    keys = np.array([0, 4e4], np.float32).reshape(1, 2, 1)
    inputs: Values = {"q": one, "k": keys, "v": keys / np.float32(4e4), "bias": None, "mask": mask}
    return flat(run(op, inputs, domain=MICROSOFT, num_heads=1, scale=1.0, **attributes))


@pytest.mark.parametrize("mask", [np.array([1]), np.array([[1, 0]])])
def test_multi_head_attention_blocks_large_scores_with_a_large_number_alone(mask: Array) -> None:
    """Lengths and padding add -10,000 unless another number is given."""
    mask = mask.astype(np.int32)
    assert large("MultiHeadAttention", mask) == pytest.approx([1.0])
    given = float(LOWEST) / 2
    assert large("MultiHeadAttention", mask, mask_filter_value=given) == pytest.approx([0.0])


def test_padding_that_keeps_no_key_is_no_zero_whatever_number_blocks() -> None:
    """PyTorch gives 0; softmax over all gives 1 and, where scores drown in the number, 0.5."""
    mask = np.zeros((1, 2), np.int32)
    assert large("MultiHeadAttention", mask) == pytest.approx([1.0])
    given = float(LOWEST) / 2
    assert large("MultiHeadAttention", mask, mask_filter_value=given) == pytest.approx([0.5])


def test_multi_head_attention_returns_scores_and_no_weights() -> None:
    """Scores 0 and 2: as weights they would be 0.12 and 0.88."""
    keys = np.array([0, 2], np.float32).reshape(1, 2, 1)
    inputs: Values = {"q": np.ones((1, 1, 1), np.float32), "k": keys, "v": keys}
    made = model("MultiHeadAttention", inputs, 4, domain=MICROSOFT, num_heads=1, scale=1.0)
    with ort_cpu.load(made, threads=1) as session:
        given = {name: array for name, array in inputs.items() if array is not None}
        assert flat(session.run(given)["y3"]) == pytest.approx([0, 2])
    assert refused(MULTI_HEAD_ATTENTION, weights=True)


def test_multi_head_attention_has_no_packed_form_on_the_cpu() -> None:
    with pytest.raises(FileError, match="not implemented for CPU"):
        mha({"query": np.zeros((1, 4, 1, 3, 8), np.float32)})


# com.microsoft.GroupQueryAttention


def test_group_query_attention_is_causal_unless_told_otherwise() -> None:
    assert flat(gqa(4, 4)[..., 0]) == pytest.approx([0, 0.5, 1, 1.5])
    assert flat(gqa(4, 4, causal=0)[..., 0]) == pytest.approx([1.5] * 4)
    assert not refused(GROUP_QUERY_ATTENTION)


def test_the_window_of_group_query_attention_counts_the_query() -> None:
    assert flat(gqa(4, 4, local_window_size=2)[..., 0]) == pytest.approx([0, 0.5, 1.5, 2.5])


def test_group_query_attention_needs_heads_of_a_multiple_of_8() -> None:
    with pytest.raises(FileError, match="head_size must be a multiple of 8"):
        gqa(4, 4, size=12)
    assert refused(GROUP_QUERY_ATTENTION, head_size=12, v_head_size=12)


def test_group_query_attention_refuses_other_keys_than_queries() -> None:
    with pytest.raises(FileError):
        gqa(2, 4, T=4)
    assert refused(GROUP_QUERY_ATTENTION, query_tokens=2, key_tokens=4)


def test_group_query_attention_extends_a_cache() -> None:
    """Past values 0 and 1, new ones 2 and 3: query 0 sees three of them, query 1 all."""
    assert flat(gqa(2, 4, past=2)[..., 0]) == pytest.approx([1.0, 1.5])
    assert flat(gqa(1, 3, batch=2, past=2)[..., 0]) == pytest.approx([1.0, 1.0])


def test_group_query_attention_takes_several_new_tokens_at_batch_1_alone() -> None:
    with pytest.raises(FileError, match="batch_size"):
        gqa(2, 4, batch=2, past=2)
    form = {"causal": "upper-left", "cache": True, "query_tokens": 2, "key_tokens": 2}
    assert refused(GROUP_QUERY_ATTENTION, **form, batch=2)
    assert not refused(GROUP_QUERY_ATTENTION, **form, batch=1)


# ai.onnx.Attention


def attention(inputs: Values, outputs: int = 1, opset: int = 23, **attributes: Any) -> Array:
    return run("Attention", inputs, outputs, opset, **attributes)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4), (1, 1, 1, 4), (2, 1)])
def test_the_standard_kernel_does_not_broadcast_a_mask_over_tokens(shape: tuple[int, ...]) -> None:
    with pytest.raises(FileError):
        attention({**standard(2, 4), "mask": np.ones(shape, bool)})


@pytest.mark.parametrize("shape", [(2, 4), (1, 2, 4), (1, 1, 2, 4)])
def test_the_standard_kernel_broadcasts_batch_and_heads(shape: tuple[int, ...]) -> None:
    mask = np.tile(np.array([True, False, True, False]), (2, 1)).reshape(shape)
    assert flat(attention({**standard(2, 4, batch=3), "mask": mask})) == pytest.approx([1.0] * 6)


@pytest.mark.parametrize(("number", "way"), [(False, "bool"), (-INF, "-inf"), (LOWEST, "lowest")])
def test_the_standard_kernel_gives_zero_on_every_blocked_row(number: Any, way: Any) -> None:
    mask = np.full((1, 4), number, bool if way == "bool" else np.float32)
    assert flat(attention({**standard(1, 4), "mask": mask})) == [0.0]
    assert blocked(STANDARD_ATTENTION, way) == "zero"


def test_the_standard_kernel_masks_after_its_softcap() -> None:
    mask = np.array([[True, True, True, False]])
    assert flat(attention({**standard(1, 4), "mask": mask}, softcap=2.0)) == pytest.approx([1.0])
    assert not refused(STANDARD_ATTENTION, mask="bool", softcap=True)


@pytest.mark.parametrize(("S", "result"), [(1, [0]), (2, [0, 0.5]), (4, [0, 0.5, 1, 1.5])])
def test_the_standard_kernel_is_causal_upper_left(S: int, result: list[float]) -> None:
    assert flat(attention(standard(S, 4), is_causal=1)) == pytest.approx(result)


@pytest.mark.parametrize("opset", [23, 24])
def test_the_standard_kernel_returns_its_weights_in_mode_3(opset: int) -> None:
    """Two of four keys allowed, of equal scores; 0 for a query that may see none."""
    mask = np.array([[1, 0, 1, 0], [0, 0, 0, 0]], bool)
    inputs: Values = {**standard(2, 4), "mask": mask}
    made = model("Attention", inputs, 4, opset, qk_matmul_output_mode=3)
    with ort_cpu.load(made, threads=1) as session:
        given = {name: array for name, array in inputs.items() if array is not None}
        assert flat(session.run(given)["y3"]) == pytest.approx([0.5, 0, 0.5, 0, 0, 0, 0, 0])
    assert not refused(STANDARD_ATTENTION, weights=True, opset=opset)


def test_the_standard_kernel_reads_lengths_at_opset_24() -> None:
    lengths = {**standard(1, 4), "mask": None, "past_key": None, "past_value": None,
               "nonpad_kv_seqlen": np.array([3], np.int64)}  # fmt: skip
    assert flat(attention(lengths, opset=24)) == pytest.approx([1.0])
    assert refused(STANDARD_ATTENTION, mask="lengths", opset=23)
    assert not refused(STANDARD_ATTENTION, mask="lengths", opset=24)


def test_the_standard_kernel_counts_causal_queries_from_the_end_of_a_rows_lengths() -> None:
    """Query 0 of 4 sees keys up to 3 - 4: none, where PyTorch lets it see key 0; then 0, 0.5, 1."""
    lengths = {**standard(4, 4), "mask": None, "past_key": None, "past_value": None,
               "nonpad_kv_seqlen": np.array([3], np.int64)}  # fmt: skip
    found = flat(attention(lengths, opset=24, is_causal=1))
    assert found == pytest.approx([0, 0, 0.5, 1])
    assert refused(STANDARD_ATTENTION, mask="lengths", causal="upper-left", opset=24)


def test_the_standard_kernel_refuses_a_past_without_a_present() -> None:
    past = np.zeros((1, 1, 2, 1), np.float32)
    inputs: Values = {**standard(1, 1), "mask": None, "past_key": past, "past_value": past + 3}
    assert flat(attention(inputs, 3)) == pytest.approx([2.0])
    with pytest.raises(FileError):
        attention(inputs, 1)


def test_a_window_of_opset_25_is_refused() -> None:
    with pytest.raises(FileError, match="left_window_size"):
        attention(standard(4, 4), opset=25, left_window_size=1)
    assert refused(STANDARD_ATTENTION, opset=25)


def test_grouped_heads_read_the_key_head_of_their_group() -> None:
    """4 query heads, 2 key heads whose values are 1 and 2."""
    inputs: Values = {
        "q": np.zeros((1, 4, 2, 8), np.float32),
        "k": np.zeros((1, 2, 2, 8), np.float32),
        "v": np.array([1, 2], np.float32).reshape(1, 2, 1, 1) * np.ones((1, 1, 2, 8), np.float32),
    }
    assert flat(attention(inputs)[0, :, 0, 0]) == pytest.approx([1, 1, 2, 2])


# dtypes


@CPU_ALONE
@pytest.mark.parametrize(("op", "native"), [("MultiHeadAttention", False), ("Attention", True)])
def test_half_precision_has_a_kernel_or_runs_through_casts(
    op: str, native: bool, tmp_path: Path
) -> None:
    import onnxruntime as ort

    domain = "" if native else MICROSOFT
    inputs = standard(2, 4, np.float16) if native else packed(2, 4, dtype=np.float16)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    serialized = model(op, inputs, domain=domain, **({} if native else {"num_heads": 1}))
    ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert ("Cast" not in kinds) is native
    table = STANDARD_ATTENTION if native else MULTI_HEAD_ATTENTION
    assert refused(table, dtype="float16") is not native


def test_the_cpu_has_no_group_query_kernel_for_bfloat16_and_one_for_half() -> None:
    assert refused(GROUP_QUERY_ATTENTION, dtype="bfloat16")
    assert not refused(GROUP_QUERY_ATTENTION, dtype="float16")
    inputs: Values = {
        **packed(4, 4, 8, dtype=np.float16), "past_key": None, "past_value": None,
        "seqlens_k": np.array([3], np.int32), "total": np.array(4, np.int32),
    }  # fmt: skip
    half = run("GroupQueryAttention", inputs, 3, domain=MICROSOFT, num_heads=1, kv_num_heads=1)
    assert flat(half[..., 0]) == pytest.approx([0, 0.5, 1, 1.5])


def test_linear_attention_sums_outer_products() -> None:
    """Keys 1, values 0, 1, 2 and 3, one feature: a query of 1 gets the sum of all so far."""
    one = np.ones((1, 4, 8), np.float32) * 0
    one[..., 0] = 1
    inputs: Values = {"q": one, "k": one, "v": packed(4, 4, 8)["value"]}
    summed = run("LinearAttention", inputs, 2, domain=MICROSOFT, q_num_heads=1, kv_num_heads=1,
                 update_rule="linear", scale=1.0)  # fmt: skip
    assert flat(summed[..., 0]) == pytest.approx([0, 1, 3, 6])
    assert not refused(LINEAR_ATTENTION)


@pytest.mark.parametrize("domain", ["", MICROSOFT])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rotary_embedding_turns_halves(domain: str, dtype: type) -> None:
    """By a quarter turn (a, b) becomes (-b, a)."""
    x = np.arange(8, dtype=dtype).reshape(1, 1, 8)
    cos, sin = np.zeros((1, 1, 4), dtype), np.ones((1, 1, 4), dtype)
    positions = np.zeros((1, 1), np.int64)
    inputs: Values = {"x": x, "cos": cos, "sin": sin}
    if domain:
        inputs = {"x": x, "positions": positions, "cos": cos[0], "sin": sin[0]}
    turned = run("RotaryEmbedding", inputs, domain=domain, num_heads=1)
    assert flat(turned) == [-4, -5, -6, -7, 0, 1, 2, 3]
    assert not refused(CONTRIB_ROTARY if domain else STANDARD_ROTARY, dtype=np.dtype(dtype).name)
