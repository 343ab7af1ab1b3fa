"""Operators that ONNX's reference evaluator lacks or does not run, and that proofs begin before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun

Array = NDArray[Any]


class RotaryEmbedding(OpRun):
    """(B, S, N * H), every head of it turned by the angles of its position.

    Specification: ONNX Runtime contrib operators, com.microsoft.RotaryEmbedding; whole heads, 3-D.
    """

    op_domain = "com.microsoft"

    def _run(self, x: Array, positions: Array, cos: Array, sin: Array, **_: Any) -> tuple[Array]:
        tokens, half = x.shape[1], cos.shape[-1]
        rows = positions if positions.ndim == 2 else positions[0] + np.arange(tokens)
        cosines, sines = (table[rows][..., None, :] for table in (cos, sin))  # S 1 H/2
        heads = x.reshape(*x.shape[:2], -1, 2 * half)
        paired = bool(getattr(self, "interleaved", 0))
        first = (..., slice(0, None, 2) if paired else slice(0, half))
        second = (..., slice(1, None, 2) if paired else slice(half, None))
        turned = np.empty_like(heads)
        turned[first] = heads[first] * cosines - heads[second] * sines
        turned[second] = heads[second] * cosines + heads[first] * sines
        return (turned.reshape(x.shape),)


class GatherElements(OpRun):
    """ONNX's own, whose evaluator fails on more than 64 elements along the axis (onnx 1.23)."""

    def _run(self, data: Array, indices: Array, axis: int = 0) -> tuple[Array]:
        axis %= data.ndim
        same = [slice(None) if i == axis else slice(size) for i, size in enumerate(indices.shape)]
        return (np.take_along_axis(data[tuple(same)], indices, axis),)


OPS: list[type[OpRun]] = [RotaryEmbedding, GatherElements]
"""For `ReferenceEvaluator(new_ops=OPS)`."""
