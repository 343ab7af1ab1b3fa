"""Ops by what half precision does to them, and what half dtypes hold: data alone."""

from __future__ import annotations

import onnx_ir as ir

FLOAT = ir.DataType.FLOAT
HEADROOM = 4.0
LARGEST = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 255 * 2.0**120}

MOVES = frozenset({
    "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
    "Identity", "Pad", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose",
    "Trilu", "Unsqueeze",
})  # fmt: skip
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Max", "Min", "Pow", "Where", "Abs"})
CARRIERS = MOVES | {"Add", "Sub", "Mul", "Max", "Min", "Where", "ConstantOfShape"}
SAME_TYPE = ("Cast", "CastLike")

FIXED = {
    "CumSum": "sums up many terms",
    "Range": "counts",
    "Resize": "computes positions",
    "Upsample": "computes positions",
    "GridSample": "reads at positions",
    "RoiAlign": "reads at positions",
    "NonMaxSuppression": "has no half form",
    "Sin": "takes large angles",
    "Cos": "takes large angles",
    "ConstantOfShape": "is made from a size",
    "EyeLike": "is made from a size",
    "OneHot": "is made from indices",
}
SUMS = frozenset({
    "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceProd",
    "ReduceLogSum", "ReduceLogSumExp",
})  # fmt: skip
ROOTS = frozenset({"Pow", "Sqrt", "Reciprocal"})
LAYERS = frozenset({
    "Attention", "Conv", "Gemm", "GroupQueryAttention", "LayerNormalization", "MatMul",
    "MultiHeadAttention",
})  # fmt: skip
CURVES = frozenset({"Exp", "Log", "Elu", "Celu", "Selu", "Softplus"})

MASK_INPUTS = {
    ("", "Attention"): 3,
    ("com.microsoft", "Attention"): 5,
    ("com.microsoft", "MultiHeadAttention"): 5,
    ("com.microsoft", "GroupQueryAttention"): 10,
}
"""Where a fused op takes its mask; out of range there means blocked, which half can say too."""


def largest(dtype: ir.DataType) -> float:
    """The largest finite number of a half dtype."""
    return LARGEST[dtype]
