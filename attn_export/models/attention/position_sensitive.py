"""Position-sensitive attention: self-attention on a feature map with a positional convolution.

The attention of the YOLO detectors since YOLOv10 ("YOLOv10: Real-Time End-to-End Object
Detection", Wang et al., 2024, section 3.2, partial self-attention).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.conv import ConvNorm

HEAD_SIZE = 64


class PositionSensitiveAttention(nn.Module):
    """softmax(Q^T K / sqrt(H/2)) over all positions of a map, channels first.

    A head per 64 channels; queries and keys have half of the head's size, which halves the cost of
    the scores. The values carry no position, so a depthwise 3x3 convolution of them is added.

    Maps (B, D, H, W) of any size to the same shape, floating dtype kept; S = T = H * W.

    Args:
        dim: D, a multiple of 64.
        fused: take PyTorch's fused operator instead of the maths written out.

    Raises:
        ValueError: dim is not a positive multiple of 64.
    """

    def __init__(self, dim: int, fused: bool = False) -> None:
        super().__init__()
        if dim < HEAD_SIZE or dim % HEAD_SIZE:
            raise ValueError(f"dim {dim} is not a positive multiple of the head size {HEAD_SIZE}")
        self.heads = dim // HEAD_SIZE
        self.key_size = HEAD_SIZE // 2
        self.fused = fused
        self.qkv = ConvNorm(dim, self.heads * (2 * self.key_size + HEAD_SIZE))
        self.positions = ConvNorm(dim, dim, kernel=3, groups=dim)
        self.proj = ConvNorm(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        qkv = self.qkv(x).flatten(2).unflatten(1, (self.heads, -1))  # (B, N, 2H, S)
        q, k, v = qkv.split([self.key_size, self.key_size, HEAD_SIZE], dim=2)  # (B, N, H, S)
        y = self.attend_fused(q, k, v) if self.fused else self.attend(q, k, v)  # (B, N, H, S)
        y = y.flatten(1, 2).unflatten(2, (height, width))  # (B, D, H, W)
        y = y + self.positions(v.flatten(1, 2).unflatten(2, (height, width)))
        out: Tensor = self.proj(y)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.transpose(-2, -1) @ k * self.key_size**-0.5  # (B, N, S, T)
        return v @ scores.softmax(dim=-1).transpose(-2, -1)  # (B, N, H, S)

    def attend_fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(-2, -1) for t in (q, k, v))  # each (B, N, S, H)
        return F.scaled_dot_product_attention(q, k, v).transpose(-2, -1)  # (B, N, H, S)
