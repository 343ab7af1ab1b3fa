"""A graph's intermediate values: exposed as outputs of the graph, a bounded part at a time.

ONNX protobufs alone: a production machine has no onnx_ir.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from attn_export.parity.tolerance import Array
from attn_export.protos import graph_tensors
from attn_export.runtimes.base import Session

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
LIMIT = 2**28  # bytes of exposed values at a time
Open = Callable[[bytes], Session]


@dataclass
class Exposable:
    """A graph of which any values can be asked for.

    Attributes:
        model: without the weights that lie in other files.
        start: makes a session of a serialized graph, with those weights.
    """

    model: onnx.ModelProto
    start: Open
    outputs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = tuple(output.name for output in self.model.graph.output)

    def run(self, inputs: Mapping[str, Array], names: Sequence[str] = ()) -> dict[str, Array]:
        """The graph's own outputs, and the named values besides."""
        with self.start(self._exposing(names)) as session:
            return session.run(inputs)

    def _exposing(self, names: Sequence[str]) -> bytes:
        kept = len(self.model.graph.output)
        new = [name for name in names if name not in self.outputs]
        try:
            for name in new:
                self.model.graph.output.append(helper.make_empty_tensor_value_info(name))
            return bytes(self.model.SerializeToString())
        finally:
            del self.model.graph.output[kept:]

    def values(self) -> list[str]:
        """What the nodes of the main graph give, in the order in which they are computed."""
        return [name for node in self.model.graph.node for name in node.output if name]


def chunks(names: Sequence[str], bytes_of: Callable[[str], int]) -> Iterator[list[str]]:
    """Consecutive names whose values stay below the limit together; one that is larger, alone."""
    part: list[str] = []
    size = 0
    for name in names:
        if part and size + bytes_of(name) > LIMIT:
            yield part
            part, size = [], 0
        part.append(name)
        size += bytes_of(name)
    if part:
        yield part


def is_half(model: onnx.ModelProto) -> bool:
    """Whether a graph computes in float16 or bfloat16 anywhere."""
    values = [*model.graph.input, *model.graph.output]
    return any(tensor.data_type in HALF for tensor in graph_tensors(model)) or any(
        value.type.tensor_type.elem_type in HALF for value in values
    )


def in_single(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with float32 wherever it has float16 or bfloat16, values named as before.

    Stored tensors stay as they are, wherever they lie, and are cast where they are read.
    """
    single = onnx.ModelProto()
    single.CopyFrom(model)
    _graph_in_single(single.graph)
    return single


def _graph_in_single(graph: onnx.GraphProto) -> None:
    graph.ClearField("value_info")
    for value in [*graph.input, *graph.output]:
        if value.type.tensor_type.elem_type in HALF:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i in HALF:
                attribute.i = TensorProto.FLOAT
            if attribute.HasField("t") and attribute.t.data_type in HALF:
                array = numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))
            if attribute.HasField("g"):
                _graph_in_single(attribute.g)
    casts = []
    for tensor in graph.initializer:
        if tensor.data_type in HALF:
            name, tensor.name = tensor.name, f"{tensor.name}_stored"
            casts.append(helper.make_node("Cast", [tensor.name], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
