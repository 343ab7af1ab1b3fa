"""GroupQueryAttention on the CPU provider continues a cache in place; what holds and what not.

The truth is float64, by the formula. Positions that are not filled hold NaN or 1e4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from attn_export.runtimes.ort import import_onnxruntime

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
Array = NDArray[Any]


def node_model(
    heads: int,
    kv_heads: int,
    size: int,
    *,
    window: int = -1,
    softcap: float = 0.0,
    bias: bool = False,
    rotary: bool = False,
    dtype: int = FLOAT,
) -> ort.InferenceSession:
    inputs = ["q", "k", "v", "past_k", "past_v", "lengths", "total"]
    inputs += ["cos", "sin"] if rotary else []
    inputs += [""] * (10 - len(inputs)) + ["bias"] if bias else []
    node = helper.make_node(
        "GroupQueryAttention", inputs, ["y", "present_k", "present_v"], domain="com.microsoft",
        num_heads=heads, kv_num_heads=kv_heads, local_window_size=window, softcap=softcap,
        do_rotary=int(rotary),
    )  # fmt: skip
    make = helper.make_tensor_value_info
    cache = ["B", kv_heads, "C", size]
    given = [
        make("q", dtype, ["B", "S", heads * size]),
        *(make(name, dtype, ["B", "S", kv_heads * size]) for name in "kv"),
        *(make(f"past_{name}", dtype, cache) for name in "kv"),
        make("lengths", TensorProto.INT32, ["B"]), make("total", TensorProto.INT32, []),
        *(make(name, dtype, ["M", size // 2]) for name in ("cos", "sin") if rotary),
        *([make("bias", dtype, ["b", "n", "S", "T"])] if bias else []),
    ]  # fmt: skip
    made = [
        make("y", dtype, ["B", "S", heads * size]),
        *(make(f"present_{name}", dtype, ["B", kv_heads, "D", size]) for name in "kv"),
    ]
    graph = helper.make_graph([node], "one", given, made)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = import_onnxruntime().SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(
    session: ort.InferenceSession, feeds: dict[str, Array], keys: Array, values: Array, share: str
) -> tuple[Array, Array, Array]:
    """y and the presents; `share` names those of "kv" that are bound to their past's buffer."""
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    for name, array in (("k", keys), ("v", values)):
        value = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(f"past_{name}", value)
        if name in share:
            binding.bind_ortvalue_output(f"present_{name}", value)
        else:
            binding.bind_output(f"present_{name}")
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    key, value, y = (found.numpy() for found in binding.get_outputs())
    return y, keys if "k" in share else key, values if "v" in share else value


def attend(
    q: Array, keys: Array, values: Array, *, window: int, softcap: float, bias: Array | None
) -> Array:
    """One row in float64: q (N, S, H), keys and values (K, T, H), causal from the end."""
    (heads, queries, size), (kv_heads, tokens) = q.shape, keys.shape[:2]
    group = heads // kv_heads
    k, v = (np.repeat(np.float64(a), group, axis=0) for a in (keys, values))
    scores = np.float64(q) @ k.transpose(0, 2, 1) / np.sqrt(size)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias[..., :tokens]
    row, column = np.arange(queries)[:, None] + tokens - queries, np.arange(tokens)
    seen = (column <= row) & ((column > row - window) if window > 0 else True)
    weights = np.exp(np.where(seen, scores, -np.inf))
    found: Array = weights / weights.sum(-1, keepdims=True) @ v
    return found


def split(array: Array, heads: int) -> Array:
    """(B, S, N * H) -> (B, N, S, H)."""
    return array.reshape(*array.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def check(
    past: Sequence[int],
    queries: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 8,
    spare: int = 3,
    garbage: float = float("nan"),
    share: str = "kv",
    with_bias: bool = False,
    dtype: int = FLOAT,
    window: int = -1,
    softcap: float = 0.0,
) -> None:
    """Rows with `past` cached tokens each get `queries` more; everything against the truth."""
    rng, rows, longest = np.random.default_rng(0), len(past), max(past)
    kind: type = np.float16 if dtype == HALF else np.float32
    q, k, v = (
        rng.standard_normal((rows, queries, n * size)).astype(kind)
        for n in (heads, kv_heads, kv_heads)
    )
    shape = (rows, kv_heads, longest + queries + spare, size)
    keys, values = (np.full(shape, garbage, kind) for _ in "kv")
    for row, length in enumerate(past):
        for cache in (keys, values):
            cache[row, :, :length] = rng.standard_normal((kv_heads, length, size))
    before = keys.copy(), values.copy()
    whole = [
        [np.concatenate([c[r, :, : past[r]], split(n, kv_heads)[r]], 1) for r in range(rows)]
        for c, n in ((keys, k), (values, v))
    ]
    feeds: dict[str, Array] = {
        "q": q, "k": k, "v": v,
        "lengths": np.array([p + queries - 1 for p in past], np.int32),
        "total": np.array(longest + queries, np.int32),
    }  # fmt: skip
    bias = None
    if with_bias:
        bias = rng.standard_normal((rows, 1, queries, longest + queries)).astype(kind) * 2
        feeds["bias"] = bias
    session = node_model(
        heads, kv_heads, size, window=window, softcap=softcap, bias=with_bias, dtype=dtype
    )
    y, present_k, present_v = run(session, feeds, keys, values, share)
    near = 3e-3 if dtype == HALF else 3e-6
    for row, length in enumerate(past):
        truth = attend(
            split(q, heads)[row], whole[0][row], whole[1][row], window=window, softcap=softcap,
            bias=None if bias is None else bias[row],
        )  # fmt: skip
        np.testing.assert_allclose(split(y, heads)[row], truth, atol=near)
        for present, expected in zip((present_k, present_v), whole, strict=True):
            assert (present[row, :, : length + queries] == expected[row]).all()
        for cache, old in zip((keys, values), before, strict=True):
            assert (cache[row, :, :length] == old[row, :, :length]).all()
    for name, cache, old in zip("kv", (keys, values), before, strict=True):
        if name not in share:
            assert np.array_equal(cache, old, equal_nan=True)


@pytest.mark.parametrize("share", ["kv", ""], ids=["shared", "apart"])
@pytest.mark.parametrize("garbage", [float("nan"), 1e4])
@pytest.mark.parametrize(
    ("past", "queries"),
    [([5], 1), ([5, 5, 5], 1), ([5, 2, 9], 1), ([0], 6), ([0, 0, 0], 6), ([4], 3), ([300], 70)],
    ids=["step", "rows", "lengths", "prompt", "prompts", "second-prompt", "long"],
)
def test_new_tokens_are_written_and_the_rest_is_not_read(
    past: list[int], queries: int, garbage: float, share: str
) -> None:
    check(past, queries, garbage=garbage, share=share)
    check(past, queries, garbage=garbage, share=share, kv_heads=4)
    check(past, queries, garbage=garbage, share=share, heads=8, kv_heads=1, size=32, spare=0)


@pytest.mark.parametrize("share", ["kv", ""], ids=["shared", "apart"])
@pytest.mark.parametrize("past", [[9], [9, 3, 6]])
def test_windows_softcap_and_bias_hold(past: list[int], share: str) -> None:
    check(past, 1, share=share, window=4)
    check(past, 1, share=share, softcap=1.5)
    check(past, 1, share=share, with_bias=True)
    check(past, 1, share=share, with_bias=True, window=4, softcap=1.5, kv_heads=4)
    check([0] * len(past), 7, share=share, with_bias=True, window=4, softcap=1.5)


def test_half_caches_are_continued() -> None:
    check([5, 2], 1, dtype=HALF)
    check([0], 4, dtype=HALF)


@pytest.mark.parametrize("share", ["k", "v"])
def test_one_buffer_that_is_shared_alone_is_right_and_copied(share: str) -> None:
    check([5], 1, share=share)


def zero_scores(
    lengths: Sequence[int], total: int
) -> tuple[ort.InferenceSession, dict[str, Array]]:
    """Q = K = 0, so that a query gets the mean of the values that it sees."""
    rows = len(lengths)
    zero = np.zeros((rows, 1, 8), np.float32)
    feeds: dict[str, Array] = {
        "q": zero, "k": zero, "v": zero + 3,
        "lengths": np.array(lengths, np.int32) - 1, "total": np.array(total, np.int32),
    }  # fmt: skip
    return node_model(1, 1, 8), feeds


def index_cache(rows: int, capacity: int) -> tuple[Array, Array]:
    values = np.arange(capacity, dtype=np.float32)[None, None, :, None]
    values = np.broadcast_to(values, (rows, 1, capacity, 8)).copy()
    return np.zeros_like(values), values


def test_a_mean_over_what_is_filled_and_no_more() -> None:
    """Values 0, 1, 2, .. 7 in the buffer; the new one, 3, lands on position 2 or 5."""
    session, feeds = zero_scores([3, 6], 6)
    keys, values = index_cache(2, 8)
    y, _, _ = run(session, feeds, keys, values, "kv")
    assert y[:, 0, 0].tolist() == pytest.approx([(0 + 1 + 3) / 3, (0 + 1 + 2 + 3 + 4 + 3) / 6])
    assert values[:, 0, :, 0].tolist() == [[0, 1, 3, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 3, 6, 7]]


def test_queries_and_keys_turned_inside_start_at_their_row_s_length() -> None:
    """The op turns heads of a multiple of 16 alone."""
    rng = np.random.default_rng(0)
    session = node_model(1, 1, 16, rotary=True)
    angles = (np.arange(12)[:, None] * 0.5 ** np.arange(8)).astype(np.float32)
    q, k = (rng.standard_normal((2, 1, 16)).astype(np.float32) for _ in "qk")
    keys, values = (np.full((2, 1, 10, 16), np.nan, np.float32) for _ in "kv")
    keys[:, :, :6], values[:, :, :6] = 0, 0
    feeds: dict[str, Array] = {
        "q": q, "k": k, "v": k, "lengths": np.array([2, 6], np.int32),
        "total": np.array(7, np.int32), "cos": np.cos(angles), "sin": np.sin(angles),
    }  # fmt: skip
    run(session, feeds, keys, values, "kv")
    for row, at in enumerate((2, 6)):
        one, two = np.split(k[row, 0], 2)
        cos, sin = np.cos(angles[at]), np.sin(angles[at])
        turned = np.concatenate([one * cos - two * sin, two * cos + one * sin])
        np.testing.assert_allclose(keys[row, 0, at], turned, atol=1e-6)


def test_several_tokens_of_several_rows_behind_a_past_are_refused() -> None:
    with pytest.raises(Exception, match="batch_size must be 1 when sequence_length > 1 and past"):
        check([4, 4, 4], 3)


def test_a_full_buffer_is_refused_and_left_alone() -> None:
    session, feeds = zero_scores([9], 9)
    keys, values = index_cache(1, 8)
    with pytest.raises(Exception, match="pre-allocated"):
        run(session, feeds, keys, values, "kv")
    assert values[0, 0, :, 0].tolist() == list(range(8))


@pytest.mark.parametrize(("length", "total"), [(20, 6), (20, 20)])
def test_a_length_beyond_the_buffer_is_refused(length: int, total: int) -> None:
    session, feeds = zero_scores([length], total)
    with pytest.raises(Exception, match=r"out of range|no greater than past_sequence_length"):
        run(session, feeds, *index_cache(1, 8), "")
