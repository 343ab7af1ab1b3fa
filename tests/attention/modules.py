"""Ways in which people write attention, all small, for the tests of finding and lowering."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, N, H = 24, 4, 6


def split_heads(x: Tensor, heads: int = N) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Layers that the subclasses use; weights far from zero, so that a swapped head shows."""

    def __init__(self, bias: bool = True, v_dim: int = D) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=bias)
        self.q, self.k = nn.Linear(D, D, bias=bias), nn.Linear(D, D, bias=bias)
        self.v = nn.Linear(D, v_dim, bias=bias)
        self.proj = nn.Linear(v_dim, D)


class Unbind(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, N, H)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))


class Chunk(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))


class HeadMajor(Block):
    """GPT-NeoX: each head's q, k and v lie side by side."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (N, 3 * H)).transpose(1, 2).split(H, dim=3)
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))


class Indexed(Block):
    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, N, H)).permute(2, 0, 3, 1, 4)
        return self.proj(merge_heads(F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])))


class Separate(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.q(x)), split_heads(self.k(x)), split_heads(self.v(x))
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v, scale=0.7)))


class Causal(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Cross(Block):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = split_heads(self.q(x)), split_heads(self.k(context)), split_heads(self.v(context))
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class QueryNorm(Block):
    """Something between projection and attention: no packed op can take it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        q = F.layer_norm(q, (H,))
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))


class Unmerged(Block):
    """The heads are not merged behind attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        return F.scaled_dot_product_attention(q, k, v).sum(dim=1)


class Classifier(nn.Module):
    """A softmax that weighs no values."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1).softmax(-1)


class FixedBins(nn.Module):
    """A softmax contracted with constants: the expectation of a distribution over fixed bins."""

    def __init__(self) -> None:
        super().__init__()
        self.bins = nn.Buffer(torch.arange(D, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1) @ self.bins


class ByHand(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        return self.proj(merge_heads((q @ k.transpose(2, 3) * H**-0.5).softmax(-1) @ v))


class ExpOverSum(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part) for part in self.qkv(x).chunk(3, dim=2))
        weights = (q @ k.transpose(2, 3)).exp()
        return self.proj(merge_heads((weights / weights.sum(-1, keepdim=True)) @ v))
