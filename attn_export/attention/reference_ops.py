"""com.microsoft ops that ONNX's reference evaluator lacks and that proofs begin in front of."""

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


OPS: list[type[OpRun]] = [RotaryEmbedding]
"""For `ReferenceEvaluator(new_ops=OPS)`."""
