"""Causal attention with a key/value cache, grouped queries, rotary embedding and a window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.attention.rotary import rotate


@dataclass(frozen=True)
class CausalCacheConfig:
    """`fused`: PyTorch's scaled_dot_product_attention, else the formula."""

    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    bias: bool = False
    fused: bool = True

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")

    @property
    def head_size(self) -> int:
        return self.dim // self.heads


def visible_keys(key_mask: Tensor, queries: int, window: int | None = None) -> Tensor:
    """Which of T cache slots each of the S newest tokens sees: bool (B, 1, S, T).

    Args:
        key_mask: bool (B, T), False for padding; the last S slots are the queries' own.
        queries: S.
        window: slots that a query sees, its own included; None for all before it.

    Raises ValueError for a window below 1, which would hide every key.

    Built from slot numbers: `is_causal=True` would align S queries with the first S of T slots.
    A token always sees itself, so that padding gives no blocked row: PyTorch's zero or another
    runtime's NaN there would pass through the values into the tokens that matter.
    """
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} hides every key; it must be at least 1")
    key_slot = torch.arange(key_mask.shape[1], device=key_mask.device)  # (T,)
    query_slot = key_slot[-queries:].unsqueeze(1)  # (S, 1)
    causal = key_slot <= query_slot  # (S, T)
    if window is not None:
        causal = causal & (key_slot > query_slot - window)
    allowed = key_mask[:, None, :] | (key_slot == query_slot)  # (B, S, T)
    return (causal & allowed).unsqueeze(1)


def token_positions(key_mask: Tensor, queries: int) -> Tensor:
    """Positions (B, S) of the S newest tokens; padding is not counted, wherever it is."""
    return (key_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -queries:]


class CausalCacheAttention(nn.Module):
    """Self-attention over the cached and the new tokens.

    Grouped queries as in "GQA" (Ainslie et al., 2023): query head n reads key/value head
    n // (heads / kv_heads).
    """

    def __init__(self, config: CausalCacheConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.kv_heads * config.head_size
        self.query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.key = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.value = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.proj = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        visible: Tensor,
        angles: tuple[Tensor, Tensor] | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """S new tokens after P cached ones.

        Args:
            x: (B, S, D).
            visible: bool (B, 1, S, P + S), from `visible_keys`.
            angles: cosines and sines (B, 1, S, H/2), from `rotary_angles`; None for no rotary
                embedding.
            past_key, past_value: (B, K, P, H), both or neither.

        Returns y (B, S, D) and the present keys and values (B, K, P + S, H): past first, new
        last, keys already rotated.
        """
        sizes = (-1, self.config.head_size)
        q = self.query(x).unflatten(-1, sizes).transpose(1, 2)  # (B, N, S, H)
        k = self.key(x).unflatten(-1, sizes).transpose(1, 2)  # (B, K, S, H)
        v = self.value(x).unflatten(-1, sizes).transpose(1, 2)  # (B, K, S, H)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        if past_key is not None and past_value is not None:
            k = torch.cat([past_key, k], dim=2)  # (B, K, T, H)
            v = torch.cat([past_value, v], dim=2)  # (B, K, T, H)
        if self.config.fused:
            # PyTorch's exporter rejects enable_gqa where no head is shared.
            shared = self.config.kv_heads < self.config.heads
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=shared)
        else:
            y = grouped_attention(q, k, v, visible)  # (B, N, S, H)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))  # (B, S, D)
        return out, k, v


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """The formula: softmax(q k^T / sqrt(H)) v, with (B, N, S, H) and (B, K, T, H)."""
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)  # (B, N, T, H)
    v = v.repeat_interleave(groups, dim=1)  # (B, N, T, H)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])  # (B, N, S, T)
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=3) @ v
