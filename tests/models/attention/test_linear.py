import math

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from attn_export.models.attention.linear import (
    RULES,
    LinearAttention,
    LinearAttentionConfig,
    RecurrentAttention,
    feature_map,
    linear_attention,
    recurrent_attention,
)
from tests.models.attention.attention_reference import (
    MASKS,
    joined,
    key_masks,
    normal,
    packed_heads,
)

LENGTHS = (1, 63, 64, 65, 300)


def feature_loops(q, k, v, allowed):
    """sum_j (phi(q_i) . phi(k_j)) v_j over its weights' sum, one query at a time."""

    def phi(x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    q, k, v = (x.detach().numpy() for x in (q, k, v))
    B, N, S, _ = q.shape
    out = np.zeros((B, N, S, v.shape[-1]))
    for b, n, i in np.ndindex(B, N, S):
        weights = np.array([phi(q[b, n, i]) @ phi(row) for row in k[b, n]])
        weights *= [allowed(b, i, j) for j in range(k.shape[2])]
        if weights.sum():
            out[b, n, i] = weights @ v[b, n] / weights.sum()
    return torch.from_numpy(out)


def recurrence_loops(rule, q, k, v, decay, beta, state):
    """The update rules as they are written, a head and a token at a time."""
    q, k, v, decay, beta, state = (x.detach().numpy() for x in (q, k, v, decay, beta, state))
    B, N, S, H = q.shape
    K = k.shape[1]
    state, out = state.copy(), np.zeros((B, N, S, v.shape[-1]))
    for b, n, t in np.ndindex(B, K, S):
        s, key, value = state[b, n], k[b, n, t], v[b, n, t]
        if "gated" in rule:
            s = np.exp(np.broadcast_to(decay[b, n, t], (H,)))[:, None] * s
        if "delta" in rule:
            value = beta[b, n, t, 0] * (value - s.T @ key)
        state[b, n] = s + np.outer(key, value)
        for group in range(N // K):
            head = n * (N // K) + group
            out[b, head, t] = state[b, n].T @ q[b, head, t] / math.sqrt(H)
    return torch.from_numpy(out), torch.from_numpy(state)


def gate_inputs(batch, heads, kv_heads, tokens, decay_size):
    unit = torch.nn.functional.normalize(normal(batch, kv_heads, tokens, 4, seed=1), dim=-1)
    return {
        "query": normal(batch, heads, tokens, 4),
        "key": unit,
        "value": normal(batch, kv_heads, tokens, 6, seed=2),
        "state": normal(batch, kv_heads, 4, 6, seed=3),
        "decay": -normal(batch, kv_heads, tokens, decay_size, seed=4).abs(),
        "beta": normal(batch, kv_heads, tokens, 1, seed=5).sigmoid(),
    }


def run_rule(rule, inputs):
    used = dict(inputs)
    if "gated" not in rule:
        used.pop("decay")
    if "delta" not in rule:
        used.pop("beta")
    return recurrent_attention(**used)


def test_feature_map_keeps_small_values_in_half_precision():
    x = torch.tensor([-8.0, 0.0, 2.0])
    expected = torch.tensor([math.exp(-8), 1.0, 3.0])
    torch.testing.assert_close(feature_map(x), expected)
    for dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(feature_map(x.to(dtype)), expected.to(dtype))


def test_equal_keys_give_the_mean_in_half_precision():
    low = torch.full((1, 1, 2, 1), -8.0, dtype=torch.bfloat16)
    values = torch.tensor([1.0, 2.0], dtype=torch.bfloat16).reshape(1, 1, 2, 1)
    y = linear_attention(low, low, values)
    torch.testing.assert_close(y, torch.full_like(y, 1.5), rtol=2**-7, atol=0)


def test_causal_form_is_the_running_mean_when_all_weights_are_equal():
    zeros, values = torch.zeros(1, 1, 4, 2), torch.tensor([0.0, 2.0, 7.0, 3.0]).reshape(1, 1, 4, 1)
    y = linear_attention(zeros, zeros, values, causal=True, chunk=3)
    torch.testing.assert_close(y.flatten(), torch.tensor([0.0, 1.0, 3.0, 3.0]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_equals_loops_at_every_length(causal, tokens):
    q, k, v = normal(1, 2, tokens, 4), normal(1, 2, tokens, 4, seed=1), normal(1, 2, tokens, 6)
    y = linear_attention(q, k, v, causal)
    torch.testing.assert_close(y, feature_loops(q, k, v, lambda b, i, j: not causal or j <= i))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 8), (2, 11), (3, 5)])
def test_layer_equals_loops(causal, mask, batch, tokens):
    layer = LinearAttention(LinearAttentionConfig(12, 3, causal)).double()
    x, real = normal(batch, tokens, 12), key_masks(batch, tokens)[mask]

    def allowed(b: int, i: int, j: int) -> bool:
        return bool(real[b, j]) and (not causal or j <= i)

    heads = feature_loops(*packed_heads(layer.qkv, x, 3), allowed)
    torch.testing.assert_close(layer(x, real), layer.out(joined(heads)))


def test_delta_rule_overwrites_the_value_of_a_key_and_the_linear_rule_adds_to_it():
    query = key = torch.ones(1, 1, 2, 1)
    value = torch.tensor([3.0, 5.0]).reshape(1, 1, 2, 1)
    state, ones = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 2, 1)
    added, _ = recurrent_attention(query, key, value, state)
    assert added.flatten().tolist() == [3, 8]
    overwritten, last = recurrent_attention(query, key, value, state, beta=ones)
    assert overwritten.flatten().tolist() == [3, 5]
    assert last.item() == 5
    halved, _ = recurrent_attention(query, key, value, state, decay=math.log(0.5) * ones)
    torch.testing.assert_close(halved.flatten(), torch.tensor([3.0, 6.5]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "decay_size"), [(2, 2, 1), (4, 2, 4)])
def test_recurrence_equals_loops(rule, tokens, heads, kv_heads, decay_size):
    inputs = gate_inputs(2, heads, kv_heads, tokens, decay_size)
    y, state = run_rule(rule, inputs)
    expected_y, expected_state = recurrence_loops(
        rule, *(inputs[name] for name in ("query", "key", "value", "decay", "beta", "state"))
    )
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(state, expected_state)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_recurrence_equals_the_operator_of_onnx_runtime(rule, tokens):
    heads, kv_heads = 4, 2
    inputs = gate_inputs(2, heads, kv_heads, tokens, decay_size=4)
    inputs = {name: x.float() for name, x in inputs.items()}
    feeds = {  # (B, N, S, H) is packed to (B, S, N*H)
        name: (x if name == "state" else joined(x)).numpy() for name, x in inputs.items()
    }
    names = ["query", "key", "value", "state"]
    names += ["decay" if "gated" in rule else "", "beta" if "delta" in rule else ""]
    node = helper.make_node(
        "LinearAttention",
        names,
        ["y", "last"],
        domain="com.microsoft",
        update_rule=rule,
        q_num_heads=heads,
        kv_num_heads=kv_heads,
    )
    used = [name for name in names if name]
    graph = helper.make_graph(
        [node],
        rule,
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, feeds[n].shape) for n in used],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "last")],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    op_y, op_last = session.run(None, {name: feeds[name] for name in used})
    y, last = run_rule(rule, inputs)
    torch.testing.assert_close(joined(y), torch.from_numpy(op_y), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, torch.from_numpy(op_last), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_token_by_token_equals_the_whole(rule):
    layer = RecurrentAttention(LinearAttentionConfig(12, 3, rule=rule)).double()
    x, state = normal(2, 5, 12), normal(2, 3, 4, 4)
    y, last = layer(x, state)
    steps = []
    for t in range(5):
        step, state = layer(x[:, t : t + 1], state)
        steps.append(step)
    torch.testing.assert_close(torch.cat(steps, dim=1), y)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("rule", RULES)
def test_masked_tokens_leave_the_state_as_if_they_were_absent(rule):
    layer = RecurrentAttention(LinearAttentionConfig(12, 3, rule=rule)).double()
    x, state = normal(1, 6, 12), normal(1, 3, 4, 4)
    real = torch.tensor([[False, True, True, False, True, False]])
    y, last = layer(x, state, real)
    expected_y, expected_last = layer(x[real][None], state)
    torch.testing.assert_close(y[real][None], expected_y)
    torch.testing.assert_close(last, expected_last)


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rule 'softmax' is not one of linear, gated"):
        LinearAttentionConfig(rule="softmax")
