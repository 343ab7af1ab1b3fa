"""One attention node as a model, and what a runtime makes of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from attn_export.errors import FileError
from attn_export.runtimes import node, ort_cpu, ort_web
from attn_export.runtimes.node_process import NodeProcess, Refused

RUNTIME = ort_cpu.NAME
"""What `run` runs on; a test may set it to ort-web."""
MICROSOFT = "com.microsoft"
LOWEST = np.finfo(np.float32).min
Array = NDArray[Any]
Values = dict[str, Array | None]


def model(
    op: str, inputs: Values, outputs: int = 1, opset: int = 23, domain: str = "", **attributes: Any
) -> bytes:
    """A node of `op` whose inputs have the shapes and dtypes of the arrays; None is left out."""
    values = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in inputs.items()
        if array is not None
    ]
    dtype = values[0].type.tensor_type.elem_type
    results = [helper.make_tensor_value_info(f"y{n}", dtype, None) for n in range(outputs)]
    names = [name if array is not None else "" for name, array in inputs.items()]
    node = helper.make_node(
        op, names, [result.name for result in results], domain=domain, **attributes
    )
    graph = helper.make_graph([node], "g", values, results)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return made.SerializeToString()


def run(
    op: str, inputs: Values, outputs: int = 1, opset: int = 23, domain: str = "", **attributes: Any
) -> Array:
    """The first output on ONNX Runtime's CPU provider, or on WebAssembly.

    Raises:
        FileError: it refuses the node, at load or when run.
    """
    serialized = model(op, inputs, outputs, opset, domain, **attributes)
    given = {name: array for name, array in inputs.items() if array is not None}
    if RUNTIME == ort_web.NAME:
        return _run_on_web(serialized, given)
    with ort_cpu.load(serialized, threads=1) as session:
        return session.run(given)["y0"]


def _run_on_web(serialized: bytes, inputs: dict[str, Array]) -> Array:
    """In one process for all, which takes half a second to start."""
    process = _web_process()
    try:
        given = {"model": np.frombuffer(serialized, np.uint8)}
        process.ask("load", given, model="", data=[], threads=1)
        return process.ask("run", inputs)[1]["y0"]
    except Refused as error:
        raise FileError(str(error), "write the node in another way") from error


@cache
def _web_process() -> NodeProcess:
    return NodeProcess([node.node()[0], str(ort_web.WORKER), str(ort_web.package()[0])])


def standard(S: int, T: int, dtype: type = np.float32, batch: int = 1) -> Values:
    """Standard Attention's Q = K = 0 and V = 0, 1, 2 ... for one head of size 1."""
    values = np.arange(T, dtype=dtype).reshape(1, 1, T, 1)
    return {
        "q": np.zeros((batch, 1, S, 1), dtype),
        "k": np.zeros((batch, 1, T, 1), dtype),
        "v": np.tile(values, (batch, 1, 1, 1)),
    }


def packed(S: int, T: int, width: int = 1, batch: int = 1, dtype: type = np.float32) -> Values:
    """The same as (B, tokens, width) inputs; each element of V's row t is t."""
    values = np.broadcast_to(np.arange(T, dtype=dtype).reshape(1, T, 1), (batch, T, width))
    return {
        "query": np.zeros((batch, S, width), dtype),
        "key": np.zeros((batch, T, width), dtype),
        "value": values.copy(),
    }
