"""Shifted-window attention: Swin (Liu et al., 2021) and Swin V2 (Liu et al., 2022).

Attention runs within windows of M x M positions, so the cost grows with the area and not with its
square: no tensor of all positions by all positions is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wrap(place: Tensor, size: int) -> Tensor:
    """place % size for places that are off by less than one size."""
    return place + size * ((place < 0).long() - (place >= size).long())


@dataclass(frozen=True)
class WindowGrid:
    """L = rows * columns windows of M x M over a map, shifted cyclically by down and right.

    Windows and positions are looked up by index instead of being cut out by reshapes, for two
    reasons: sizes stay symbolic at export whether or not they are multiples of M, and shift,
    padding and cropping become part of the same look-up.
    """

    rows: int
    columns: int
    window: int
    down: int
    right: int

    @classmethod
    def over(cls, height: int, width: int, window: int, shift: int) -> WindowGrid:
        """Enough windows for every position; an axis of a single window is not shifted."""
        rows, columns = ((size + window - 1) // window for size in (height, width))
        down, right = (torch.sym_min(shift, (n - 1) * window) for n in (rows, columns))
        return cls(rows, columns, window, down, right)

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column (L, S) of each place of each window in the shifted map."""
        M = self.window
        number = torch.arange(self.rows * self.columns, device=device)[:, None]
        place = torch.arange(M * M, device=device)
        row = number // self.columns
        column = number - row * self.columns
        return row * M + place // M, column * M + place % M

    def partition(self, x: Tensor) -> Tensor:
        """Maps (B, height, width, D) to windows (B, L, S, D), zero where there is no map."""
        height, width = x.shape[1:3]
        y_LS, x_LS = self.places(x.device)
        y_LS = wrap(y_LS + self.down, self.rows * self.window)
        x_LS = wrap(x_LS + self.right, self.columns * self.window)
        inside = (y_LS < height) & (x_LS < width)
        return x[:, y_LS.clamp(max=height - 1), x_LS.clamp(max=width - 1)] * inside.unsqueeze(-1)

    def merge(self, windows: Tensor, height: int, width: int) -> Tensor:
        """The inverse of `partition`: (B, L, S, D) to (B, height, width, D)."""
        M = self.window
        y = wrap(torch.arange(height, device=windows.device) - self.down, self.rows * M)[:, None]
        x = wrap(torch.arange(width, device=windows.device) - self.right, self.columns * M)
        return windows[:, y // M * self.columns + x // M, y % M * M + x % M]

    def apart(self, device: torch.device) -> Tensor:
        """(L, S, S) bool: pairs in one window that the shift brought in from opposite sides."""
        y_LS, x_LS = self.places(device)
        below = y_LS >= self.rows * self.window - self.down
        beyond = x_LS >= self.columns * self.window - self.right
        part = 2 * below.long() + beyond.long()
        return part.unsqueeze(-1) != part.unsqueeze(-2)


def relative_positions(window: int) -> Tensor:
    """(M*M, M*M, 2): rows and columns from each key to each query of a window."""
    at = torch.arange(window)
    where = torch.stack(torch.meshgrid(at, at, indexing="ij"), dim=-1).flatten(0, 1)  # (M*M, 2)
    return where[:, None] - where


class WindowAttention(nn.Module):
    """Multi-head attention within windows of a map, relative position bias, optional shift.

    Version 1: softmax(Q K^T / sqrt(H) + table) V. Version 2: the cosine of query and key over a
    learned temperature, and a bias that a small network computes from log-spaced offsets.

    Maps (B, H, W, D) of any size to the same shape; the map is padded with zeros at the bottom and
    right to whole windows. As in the published models, padding takes part as a key.

    Args:
        dim: D.
        heads: N; D / N is the head size.
        window: M.
        shift: how far the windows are shifted, usually 0 or M // 2.
        version: 1 or 2.
        fused: take PyTorch's fused operator instead of the maths written out.

    Raises:
        ValueError: dim is not a multiple of heads, shift not in 0..M-1, or an unknown version.
    """

    index: Tensor
    log_offsets: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int = 7,
        shift: int = 0,
        version: int = 1,
        fused: bool = True,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        if not 0 <= shift < window:
            raise ValueError(f"shift {shift} is not in 0..{window - 1} for a window of {window}")
        if version not in (1, 2):
            raise ValueError(f"version {version} is neither 1 nor 2")
        self.heads, self.window, self.shift = heads, window, shift
        self.version, self.fused = version, fused
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        offsets = relative_positions(window)  # (S, S, 2), each in -(M-1)..M-1
        index = (offsets + window - 1) @ torch.tensor([2 * window - 1, 1])
        self.register_buffer("index", index, persistent=False)
        if version == 1:
            self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
            nn.init.trunc_normal_(self.table, std=0.02)
        else:
            spread = 8 * offsets / max(window - 1, 1)
            log_offsets = spread.sign() * (1 + spread.abs()).log2() / 3  # log_8
            self.register_buffer("log_offsets", log_offsets, persistent=False)
            self.bias_mlp = nn.Sequential(
                nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, heads, bias=False)
            )
            self.log_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))

    def position_bias(self) -> Tensor:
        """(N, S, S), added to the scores."""
        if self.version == 1:
            return self.table[self.index].permute(2, 0, 1)
        bias: Tensor = 16 * self.bias_mlp(self.log_offsets).sigmoid()
        return bias.permute(2, 0, 1)

    def scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys whose plain product is the score."""
        if self.version == 1:
            return q * q.shape[-1] ** -0.5, k
        scale = self.log_scale.clamp(max=math.log(100.0)).exp()
        return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        _, height, width, _ = x.shape
        grid = WindowGrid.over(height, width, self.window, self.shift)
        bias = self.position_bias().unsqueeze(0)  # (1, N, S, S)
        if self.shift:
            bias = bias.masked_fill(grid.apart(x.device).unsqueeze(1), -torch.inf)  # (L, N, S, S)
        y = self.attend(grid.partition(x), bias)  # (B, L, S, D)
        return grid.merge(y, height, width)

    def attend(self, windows: Tensor, bias: Tensor) -> Tensor:
        """Windows (B, L, S, D) and bias (1 or L, N, S, S) to (B, L, S, D)."""
        B, L, _, _ = windows.shape
        qkv = self.qkv(windows).flatten(0, 1).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B*L, N, S, H)
        q, k = self.scaled(q, k)
        bias = bias.expand(B, L, -1, -1, -1).flatten(0, 1)  # (B*L, N, S, S)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        else:
            y = (q @ k.mT + bias).softmax(dim=-1) @ v
        y = y.transpose(1, 2).flatten(2).unflatten(0, (B, L))  # (B, L, S, D)
        out: Tensor = self.proj(y)
        return out
