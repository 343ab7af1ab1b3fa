"""What an .onnx file computes in float64, on ONNX's reference evaluator, in a process of its own.

The evaluator is plain numpy: a convolution may take minutes there, and only a process can be
stopped. `python -m attn_export.truth MODEL INPUTS.npz OUTPUTS.npz` is that process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from attn_export.bundle_checks import graph_tensors
from attn_export.errors import one_line
from attn_export.parity.tolerance import Array

SECONDS = 60.0
LIMIT = 2**29  # bytes of weights; in double and with their copies they take five times that
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def compute(
    path: Path, cases: Sequence[Mapping[str, Array]], seconds: float = SECONDS
) -> tuple[list[dict[str, Array]], str]:
    """Outputs of each case in float64; none, and why not, where the evaluator cannot or is slow."""
    with tempfile.TemporaryDirectory(prefix="attn-export-") as folder:
        inputs, outputs = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        packed = {f"{i}/{name}": a for i, case in enumerate(cases) for name, a in case.items()}
        np.savez(inputs, allow_pickle=False, **packed)
        command = [sys.executable, "-m", "attn_export.truth", path, inputs, outputs]
        try:
            done = subprocess.run(
                list(map(str, command)), capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return [], f"the reference evaluator takes more than {seconds:g} s"
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
            return [], f"the reference evaluator does not run it ({one_line(Exception(last))})"
        return _unpack(outputs, len(cases)), ""


def _unpack(path: Path, count: int) -> list[dict[str, Array]]:
    found: list[dict[str, Array]] = [{} for _ in range(count)]
    with np.load(path, allow_pickle=False) as arrays:
        for key, array in arrays.items():
            index, _, name = key.partition("/")
            found[int(index)][name] = array
    return found


def in_double(model: onnx.ModelProto) -> None:
    """Make every float of a model, its subgraphs and functions a double, in place."""
    for tensor in graph_tensors(model):
        if tensor.data_type in FLOATS:
            array = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    _graph_in_double(model.graph)
    for function in model.functions:
        _nodes_in_double(function.node)


def _graph_in_double(graph: onnx.GraphProto) -> None:
    for value in [*graph.input, *graph.output]:
        if value.type.tensor_type.elem_type in FLOATS:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    graph.ClearField("value_info")
    _nodes_in_double(graph.node)


def _nodes_in_double(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i in FLOATS:
                attribute.i = TensorProto.DOUBLE
            elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                single = attribute.name == "value_float"
                array = np.asarray(attribute.f if single else attribute.floats, np.float64)
                tensor = numpy_helper.from_array(array)
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
            for graph in (attribute.g, *attribute.graphs):
                _graph_in_double(graph)


def _main(path: Path, inputs: Path, outputs: Path) -> None:
    model = onnx.load(path)
    in_double(model)
    evaluator = ReferenceEvaluator(model)
    with np.load(inputs, allow_pickle=False) as arrays:
        given = dict(arrays.items())
    made: dict[str, Array] = {}
    for index in sorted({int(key.partition("/")[0]) for key in given}):
        feeds = {
            key.partition("/")[2]: a.astype(np.float64) if a.dtype.kind == "f" else a
            for key, a in given.items()
            if key.startswith(f"{index}/")
        }
        with np.errstate(all="ignore"):  # blocked rows give NaN on the way
            results = evaluator.run(None, feeds)
        for name, result in zip(evaluator.output_names, results, strict=True):
            made[f"{index}/{name}"] = np.asarray(result)
    np.savez(outputs, allow_pickle=False, **made)


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:]))
