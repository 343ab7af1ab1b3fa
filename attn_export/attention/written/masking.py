"""What the steps between product and softmax do to the scores, as scale, softcap and one mask.

Standard Attention computes softmax(softcap(scale * Q K^T) + mask) V in this order. A factor behind
a mask is multiplied into the mask; a cap behind one cannot be expressed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.masks import lowest
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.sizes import sizes
from attn_export.attention.written.frame import Frame, pull
from attn_export.attention.written.steps import Bias, Block, Cap, Factor, Move, Spread, Step


@dataclass
class Masking:
    """Scale, softcap and mask of one attention.

    Attributes:
        scale: a factor on Q K^T.
        spreads: (tensor on the frame, whether it divides) by which the scores are multiplied.
        bias: what is added to the scores, on the frame.
        condition: bool on the frame, False blocks.
        fill: what blocked scores become; -inf, or a finite number that blocks as well.
        sources: every tensor of the graph that takes part.
    """

    scale: float = 1.0
    softcap: float = 0.0
    spreads: list[tuple[ir.Value, bool]] = field(default_factory=list)
    bias: ir.Value | None = None
    condition: ir.Value | None = None
    fill: float = -np.inf
    sources: list[ir.Value] = field(default_factory=list)
    _blocks: list[tuple[ir.Value, bool]] = field(default_factory=list)

    def mask(self, b: Builder, like: ir.Value) -> ir.Value | None:
        """One mask that does the same: bool where blocked scores are -inf, else additive.

        A finite fill in front of the softmax gives a query without any key the mean of the values.
        Half the most negative number does the same, however large the scores, and is not what
        ONNX Runtime takes for a blocked row.
        """
        if self.condition is None:
            return self.bias
        if self.bias is None and np.isneginf(self.fill):
            return self.condition
        blocks = -np.inf if np.isneginf(self.fill) else lowest(like) / 2
        allowed = self.bias if self.bias is not None else b.number(0.0, like)
        shape = (
            sizes(self.condition) if self.bias is None else _broadcast(self.condition, self.bias)
        )
        inputs = [self.condition, allowed, b.number(blocks, like)]
        return b.op("Where", inputs, shape, like.dtype)

    def block(self, b: Builder, given: ir.Value, keeps: bool, on_frame: ir.Value) -> None:
        """Allow only what a condition allows as well; `given` is it as it stands in the graph."""
        if (given, keeps) in self._blocks:
            return
        self._blocks.append((given, keeps))
        self.sources.append(given)
        if not keeps:
            on_frame = b.op("Not", [on_frame], sizes(on_frame))
        if self.condition is not None:
            shape = _broadcast(self.condition, on_frame)
            on_frame = b.op("And", [self.condition, on_frame], shape)
        self.condition = on_frame


def masking(b: Builder, steps: list[Step], frame: Frame) -> Masking:
    """Take the steps in the order in which the scores go through them.

    Raises:
        NotLowerable: standard Attention has no place for one of them.
    """
    found = Masking()
    for item, view in zip(steps, frame.at_steps, strict=True):
        if isinstance(item, Move):
            continue
        if isinstance(item, Factor):
            _factor(b, found, item.value)
        elif isinstance(item, Cap):
            if found.bias is not None or found.condition is not None or found.softcap:
                raise NotLowerable(Reason.MASK, "its mask is capped with the scores")
            if found.spreads:
                raise NotLowerable(
                    Reason.SOFTCAP, "its softcap comes after a factor for each query"
                )
            found.softcap, found.scale = item.cap, found.scale * item.factor * item.cap
        elif isinstance(item, Block):
            found.block(b, item.condition, item.keeps, pull(b, item.condition, view, frame.sizes))
            found.fill = item.fill if np.isfinite(item.fill) else found.fill
        else:
            _tensor(b, found, item, pull(b, item.value, view, frame.sizes))
            found.sources.append(item.value)
    return found


def _factor(b: Builder, found: Masking, number: float) -> None:
    if found.condition is not None and number <= 0:
        raise NotLowerable(Reason.MASK, "its mask is multiplied by a negative number")
    found.scale *= number
    found.softcap *= number
    if found.bias is not None:
        factor = b.number(number, found.bias)
        found.bias = b.op("Mul", [found.bias, factor], sizes(found.bias))


def _tensor(b: Builder, found: Masking, item: Bias | Spread, value: ir.Value) -> None:
    if isinstance(item, Spread):
        if found.softcap or found.condition is not None or found.bias is not None:
            raise NotLowerable(Reason.MASK, "its mask is multiplied by a tensor with the scores")
        found.spreads.append((value, item.divides))
        return
    if item.negative:
        value = b.op("Neg", [value], sizes(value))
    if found.bias is not None:
        value = b.op("Add", [found.bias, value], _broadcast(found.bias, value))
    found.bias = value


def _broadcast(left: ir.Value, right: ir.Value) -> list[int | object]:
    first, second = sizes(left), sizes(right)
    rank = max(len(first), len(second))
    first = (1,) * (rank - len(first)) + first
    second = (1,) * (rank - len(second)) + second
    return [b if a == 1 else a for a, b in zip(first, second, strict=True)]
