"""An int8 graph: weights and activations of products and convolutions, calibrated.

ONNX Runtime's own quantisation puts QuantizeLinear and DequantizeLinear around each MatMul, Gemm
and Conv that has constant weights. Products of attention, which have none, stay float, so that all
fused ops stay whole; softmax and norms are float as well.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from attn_export.capability.kernels import TENSORRT
from attn_export.errors import ExportError, one_line
from attn_export.parity.tolerance import Array
from attn_export.weights import write_graphs

QUANTISED = ("MatMul", "Gemm", "Conv")
FLOAT_RESULT = ("MatMul", "Gemm")  # ONNX Runtime's int8 products give float, a Conv gives int8
LARGE = 1_500_000_000  # bytes; beyond it protobuf's limit is near


def quantise(model: ir.Model, runtime: str, samples: Sequence[Mapping[str, Array]]) -> ir.Model:
    """A quantised copy of a lowered float32 graph.

    Args:
        samples: inputs that the ranges of activations are taken from.

    Raises:
        ExportError: nothing can be quantised, or ONNX Runtime's quantisation fails.
    """
    names = quantisable(model)
    if not names:
        raise ExportError(
            "no product or convolution with constant weights is there to be quantised",
            "use --precision fp32 or fp16",
        )
    from onnxruntime import quantization as q

    symmetric = runtime == TENSORRT  # which takes no other zero point than 0
    signed = q.QuantType.QInt8
    large = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    with tempfile.TemporaryDirectory() as folder:
        write_graphs(Path(folder), {"single.onnx": model}, "single.data")
        made = Path(folder) / "int8.onnx"
        level = logging.getLogger().level
        try:
            logging.getLogger().setLevel(logging.ERROR)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                q.quantize_static(
                    Path(folder) / "single.onnx",
                    made,
                    _Samples(samples),
                    quant_format=q.QuantFormat.QDQ,
                    nodes_to_quantize=names,
                    op_types_to_quantize=list(QUANTISED),
                    per_channel=True,
                    activation_type=signed if symmetric else q.QuantType.QUInt8,
                    weight_type=signed,
                    use_external_data_format=large > LARGE,
                    extra_options={
                        "ActivationSymmetric": symmetric,
                        "OpTypesToExcludeOutputQuantization": list(FLOAT_RESULT),
                    },
                )
        except Exception as error:  # its exceptions share no base class
            raise ExportError(
                f"ONNX Runtime's quantisation fails ({type(error).__name__}: {one_line(error)})",
                "use --precision fp32 or fp16",
            ) from error
        finally:
            logging.getLogger().setLevel(level)
        quantised = ir.load(made)
        for value in quantised.graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                array = value.const_value.numpy().copy()
                value.const_value = ir.Tensor(array, dtype=value.dtype, name=str(value.name))
    return quantised


def quantisable(model: ir.Model) -> list[str]:
    """Names of the products and convolutions of the main graph with constant weights."""
    return [
        str(node.name)
        for node in model.graph
        if node.op_type in QUANTISED
        and node.domain in ("", "ai.onnx")
        and node.inputs[1] is not None
        and node.inputs[1].const_value is not None
        and node.inputs[1].dtype == ir.DataType.FLOAT
    ]


class _Samples:
    """Hands out samples one after the other; onnxruntime takes for its reader what has get_next."""

    def __init__(self, samples: Sequence[Mapping[str, Array]]) -> None:
        self.left = iter(samples)

    def get_next(self) -> dict[str, Array] | None:
        sample = next(self.left, None)
        return None if sample is None else dict(sample)
