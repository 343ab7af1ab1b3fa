"""Linear attention: Katharopoulos et al. (2020), and its gated and delta forms: Gated Linear
Attention (Yang et al., 2023), DeltaNet (Yang et al., 2024), Gated DeltaNet (Yang et al., 2024).

The softmax gives way to a product of features, phi(q) . phi(k), so that keys and values are summed
up once in a state (H, Hv) that every query reads: time and memory grow with S, not with S * S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from attn_export.models.attention.blocks import from_blocks, to_blocks
from attn_export.models.attention.scaled_dot_product import merge_heads

RULES = ("linear", "gated", "delta", "gated_delta")


def feature_map(x: Tensor) -> Tensor:
    """elu(x) + 1, which is exp(x) below zero and x + 1 above.

    Written without the subtraction and addition of 1, in which exp(x) is lost in half precision.
    """
    return x.clamp(max=0).exp() + x.relu()


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = False,
    key_mask: Tensor | None = None,
    chunk: int = 64,
) -> Tensor:
    """sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j), with j <= i where causal.

    Args:
        query: (B, N, S, H).
        key: (B, N, T, H); T = S where causal.
        value: (B, N, T, Hv).
        key_mask: bool (B, T), True where a key counts.
        chunk: tokens that the causal form handles at once; no influence on the result.

    Returns:
        (B, N, S, Hv); zeros where no key counts.
    """
    q, k = feature_map(query), feature_map(key)
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0.0)
    v = F.pad(value, (0, 1), value=1.0)  # (B, N, T, Hv+1): the last column sums the weights up
    y = causal_product(q, k, v, chunk) if causal else q @ (k.transpose(-2, -1) @ v)
    y, total = y[..., :-1], y[..., -1:]
    return y / total.masked_fill(total == 0, 1.0)


def causal_product(query: Tensor, key: Tensor, value: Tensor, chunk: int) -> Tensor:
    """sum over j <= i of (q_i . k_j) v_j, in chunks: the state of all chunks before, plus the own.

    A loop over time would say the same and freeze the length at export.
    """
    S = query.shape[2]

    def split(x: Tensor) -> Tensor:
        return to_blocks(x.transpose(1, 2), chunk).permute(0, 3, 1, 2, 4)

    q, k, v = split(query), split(key), split(value)  # (B, N, C, W, H), v: (B, N, C, W, Hv)
    states = k.transpose(-2, -1) @ v  # (B, N, C, H, Hv)
    before = F.pad(states, (0, 0, 0, 0, 1, 0))[:, :, :-1].cumsum(dim=2)
    y = q @ before + (q @ k.transpose(-2, -1)).tril() @ v  # (B, N, C, W, Hv)
    return from_blocks(y.permute(0, 2, 3, 1, 4), S).transpose(1, 2)


def recurrent_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of ONNX Runtime's LinearAttention; `decay` and `beta` choose its update rule.

        linear         S_t = S_(t-1) + k_t v_t^T
        gated (decay)  S_t = exp(g_t) S_(t-1) + k_t v_t^T
        delta (beta)   S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T
        gated_delta    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T

    and o_t = scale * S_t^T q_t. It exports as one scan over time, of any length.

    Args:
        query: (B, N, S, H).
        key: (B, K, S, H), with N a multiple of K: query heads share a state in groups.
        value: (B, K, S, Hv).
        state: (B, K, H, Hv), zeros at the start.
        decay: log of the share of the state that is kept, (B, K, S, H) or (B, K, S, 1).
        beta: how far the stored value moves to the new one, (B, K, S, 1).
        scale: 1 / sqrt(H) if None.

    Returns:
        (B, N, S, Hv) and the state after the last token.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    groups = torch.unflatten(query * scale, 1, (key.shape[1], -1))  # (B, K, N/K, S, H)
    inputs = {"query": groups, "key": key, "value": value}
    if decay is not None:
        inputs["decay"] = decay
    if beta is not None:
        inputs["beta"] = beta

    def step(state: Tensor, now: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        k, v = now["key"], now["value"]  # (B, K, H), (B, K, Hv)
        if "decay" in now:
            state = state * now["decay"].exp()[..., None]
        if "beta" in now:
            stored = (k[..., None, :] @ state).squeeze(-2)  # (B, K, Hv)
            v = now["beta"] * (v - stored)
        state = state + k[..., :, None] * v[..., None, :]  # (B, K, H, Hv)
        return state, now["query"] @ state  # (B, K, N/K, Hv)

    by_time = {name: x.movedim(-2, 0) for name, x in inputs.items()}
    if torch.compiler.is_exporting():
        # A Python loop would freeze the length that it is traced at. The copies cut the gradients,
        # with which a scan can't be decomposed for ONNX (torch 2.13); no copy is left in the graph.
        cut = {name: x.detach().clone() for name, x in by_time.items()}
        state, y = scan(step, state.detach().clone(), cut)
    else:
        outputs = []
        for t in range(query.shape[-2]):
            state, now = step(state, {name: x[t] for name, x in by_time.items()})
            outputs.append(now)
        y = torch.stack(outputs)
    return y.permute(1, 2, 3, 0, 4).flatten(1, 2), state  # y: (S, B, K, N/K, Hv)


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Sizes of a layer; `causal` is for `LinearAttention`, `rule` for `RecurrentAttention`."""

    dim: int = 64
    heads: int = 4
    causal: bool = False
    rule: str = "gated_delta"

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.rule not in RULES:
            raise ValueError(f"rule {self.rule!r} is not one of {', '.join(RULES)}")


class LinearAttention(nn.Module):
    """elu + 1 self-attention, (B, S, D) to (B, S, D); key mask bool (B, S)."""

    def __init__(self, config: LinearAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.config.heads, -1))  # (B, S, 3, N, H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, N, S, H)
        y = linear_attention(q, k, v, self.config.causal, key_mask)  # (B, N, S, H)
        out: Tensor = self.out(merge_heads(y))  # (B, S, D)
        return out


class RecurrentAttention(nn.Module):
    """Gated and delta-rule self-attention with a state that one call hands to the next.

    Tokens (B, S, D), the state (B, N, H, H) before them and a key mask, bool (B, S), to tokens
    (B, S, D) and the state after them. A masked token leaves the state as it is.
    """

    def __init__(self, config: LinearAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.gates = nn.Linear(config.dim, 2 * config.heads)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(
        self, x: Tensor, past_state: Tensor, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(x).unflatten(-1, (3, self.config.heads, -1))  # (B, S, 3, N, H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, N, S, H)
        gates = self.gates(x).transpose(1, 2)[..., None]  # (B, 2N, S, 1)
        decay, beta = F.logsigmoid(gates).chunk(2, dim=1)  # each (B, N, S, 1), in log space
        k = F.normalize(k, dim=-1)  # a delta rule overwrites what lies along a unit key
        if key_mask is not None:
            ignored = ~key_mask[:, None, :, None]  # (B, 1, S, 1)
            k, decay = k.masked_fill(ignored, 0.0), decay.masked_fill(ignored, 0.0)
        y, state = recurrent_attention(
            q,
            k,
            v,
            past_state,
            decay if "gated" in self.config.rule else None,
            beta.exp() if "delta" in self.config.rule else None,
        )
        return self.out(merge_heads(y)), state  # (B, S, D), (B, N, H, H)
