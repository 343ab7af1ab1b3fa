"""Cutting a sequence of any length into blocks, in a form that stays dynamic at export.

What is plain in eager mode (pad to a multiple, view, slice the rest off) makes the exporter prove
facts about S // W that it can't, and so freezes the length. Here every pad is a constant, tokens
are taken by index instead of by slice, and the number of blocks is never 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def to_blocks(x: Tensor, block: int, behind: int = 0, ahead: int = 0) -> Tensor:
    """Tokens (B, S, ...) to C = S // W + 2 blocks of W, each with its neighbours.

    Returns:
        (B, C, (behind + 1 + ahead) * W, ...), with zeros (or False) past both ends.
    """
    blocks = x.shape[1] // block + 2
    size = (behind + 1 + ahead) * block
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (behind * block, (ahead + 2) * block))
    start = torch.arange(blocks, device=x.device) * block
    index = start[:, None] + torch.arange(size, device=x.device)  # (C, size)
    return padded[:, index]


def from_blocks(x: Tensor, tokens: int) -> Tensor:
    """Blocks (B, C, W, ...) to the first S tokens (B, S, ...)."""
    return x.flatten(1, 2).index_select(1, torch.arange(tokens, device=x.device))
