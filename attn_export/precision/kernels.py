"""Which ops compute in half precision on which runtime: data with its source.

ONNX Runtime's CPU provider runs a float16 node without a kernel in float32, between Casts of its
own; its CUDA provider leaves it to the CPU, with copies between. bfloat16 nodes without a kernel
do not load at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from attn_export.capability.kernels import CUDA

SOURCE = "ONNX Runtime's list of kernels"

NO_FLOAT16_ON_CUDA = frozenset({"EyeLike", "GridSample", "Range", "RoiAlign"})

BFLOAT16_ON_CUDA = frozenset({
    "Add", "Attention", "Concat", "Div", "Erf", "Exp", "Expand", "Flatten", "Gather",
    "GatherElements", "GatherND", "Gelu", "Gemm", "HardSigmoid", "HardSwish", "Identity", "IsInf",
    "IsNaN", "LayerNormalization", "MatMul", "Max", "Min", "Mul", "Neg", "Pow",
    "RMSNormalization", "ReduceSum", "Relu", "Reshape", "RotaryEmbedding", "ScatterND", "Sigmoid",
    "Sign", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "TensorScatter",
    "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Without Conv and AveragePool, which have it from opset 22 on in later versions alone."""

CONTRIB = frozenset({
    "Attention", "MultiHeadAttention", "GroupQueryAttention", "RotaryEmbedding",
    "LinearAttention", "SkipLayerNormalization", "FastGelu", "BiasGelu", "QuickGelu", "Gelu",
})  # fmt: skip
"""com.microsoft ops all of whose float inputs and outputs share one type."""


def has_kernel(op_type: str, runtime: str, dtype: ir.DataType) -> bool:
    """Whether a standard op may be left in `dtype` on a runtime."""
    if runtime != CUDA:
        return True
    if dtype == ir.DataType.FLOAT16:
        return op_type not in NO_FLOAT16_ON_CUDA
    return op_type in BFLOAT16_ON_CUDA


def takes(node: ir.Node, opset: int, dtype: ir.DataType) -> tuple[Sequence[bool], Sequence[bool]]:
    """Which inputs and outputs of a node may be of `dtype`, by the op's schema; () for none.

    Of a com.microsoft op all may, of an unknown one none.
    """
    everything = [True] * len(node.inputs), [True] * len(node.outputs)
    if node.domain == "com.microsoft":
        return everything if node.op_type in CONTRIB else ((), ())
    if node.domain not in ("", "ai.onnx"):
        return (), ()
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return (), ()
    wanted = f"tensor({dtype.name.lower()})"
    allowed = {row.type_param_str: row.allowed_type_strs for row in schema.type_constraints}

    def may(formals: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> list[bool]:
        names = [formals[min(index, len(formals) - 1)].type_str for index in range(count)]
        return [wanted in allowed.get(name, [name]) for name in names]

    return may(schema.inputs, len(node.inputs)), may(schema.outputs, len(node.outputs))
