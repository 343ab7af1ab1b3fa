"""The matrix-multiply peak of this machine: what one large product reaches on a runtime.

The roofline (Williams, Waterman and Patterson, 2009) of a model whose time goes into products. The
weights are constant, as a model's are, so that a runtime may lay them out once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from attn_export.runtimes import openvino, ort_cpu
from attn_export.runtimes.base import Session
from attn_export.runtimes.table import MODULE_RUNTIMES

SIZES = (512, 1024)  # rows, and square weights; whichever is faster: caches differ
OPSET, IR_VERSION = 18, 10


def peak_gflops(runtime: str, threads: int, seconds: float) -> float | None:
    """float32 GFLOP/s of the best product; None for a runtime that this cannot be asked of.

    The best of all calls, since it stands for what the machine can do, not for what it did.
    """
    best = 0.0
    for size in SIZES:
        product = _product(runtime, threads, size)
        if product is None:
            return None
        product()
        until = time.perf_counter() + seconds / len(SIZES)
        while (start := time.perf_counter()) < until:
            product()
            best = max(best, 2 * size**3 / (time.perf_counter() - start) / 1e9)
    return best


def _product(runtime: str, threads: int, size: int) -> Callable[[], object] | None:
    """A call that multiplies two float32 matrices of size x size."""
    rng = np.random.default_rng(0)
    rows, weight = rng.standard_normal((2, size, size), dtype=np.float32)
    if runtime in MODULE_RUNTIMES:
        import torch

        left, right = torch.from_numpy(rows), torch.from_numpy(weight)
        return lambda: torch.mm(left, right)
    loaders: dict[str, Callable[[bytes, int], Session]] = {
        ort_cpu.NAME: ort_cpu.load,
        openvino.NAME: openvino.load,
    }
    if runtime not in loaders:
        return None
    session = loaders[runtime](_model(weight), threads)
    return lambda: session.run({"rows": rows})


def _model(weight: NDArray[np.float32]) -> bytes:
    size = weight.shape[0]
    names = ("rows", "result")
    rows, result = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [size] * 2) for n in names)
    node = helper.make_node("MatMul", ["rows", "weight"], ["result"])
    constants = [numpy_helper.from_array(weight, "weight")]
    graph = helper.make_graph([node], "product", [rows], [result], constants)
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return bytes(onnx.ModelProto.SerializeToString(model))
