"""Turn a float32 graph into half precision, but for the nodes that a plan keeps."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from attn_export.attention.data import LENDERS
from attn_export.precision.kernels import takes
from attn_export.precision.ops import FLOAT, largest
from attn_export.precision.plan import Plan


def convert(model: ir.Model, plan: Plan, dtype: ir.DataType, half_io: Collection[str]) -> None:
    """Convert in place.

    Args:
        plan: made for this very model.
        dtype: FLOAT16 or BFLOAT16.
        half_io: inputs and outputs of the graph that become half as well, such as caches.

    1. Each use of a value wants one type; where the value has the other, one Cast serves all such.
    2. Constants are stored in the type that their readers want, in both where they differ.
    3. Numbers out of range are cut to half of the largest one, so that a score may still be added
       to what blocks a key; infinities stay.
    4. Bodies of If, Loop and Scan stay float32, whatever they read.
    """
    _Conversion(model, plan, dtype, half_io).run()


class _Conversion:
    def __init__(
        self, model: ir.Model, plan: Plan, dtype: ir.DataType, half_io: Collection[str]
    ) -> None:
        self.graph, self.plan, self.dtype = model.graph, plan, dtype
        self.suffix = "fp16" if dtype == ir.DataType.FLOAT16 else "bf16"
        self.half_io = half_io
        self.cut = largest(dtype) / 2
        self.wants: dict[tuple[int, int], bool] = {}  # (node, input index) -> half
        self.halves: set[int] = set()
        opset = model.opset_imports.get("", 23)
        for node in self.graph:
            if plan.stays(node):
                continue
            inputs, outputs = takes(node, opset, dtype)
            for index, may in enumerate(inputs):
                self.wants[id(node), index] = may
            self.halves |= {
                id(value)
                for value, may in zip(node.outputs, outputs, strict=False)
                if may and value.dtype == FLOAT
            }

    def run(self) -> None:
        floats = [v for v in self.graph.inputs if v.dtype == FLOAT]
        self.halves |= {id(v) for v in floats if v.name in self.half_io}
        weights = [v for v in self.graph.initializers.values() if v.dtype == FLOAT]
        made = [v for node in self.graph for v in node.outputs if v.dtype == FLOAT]
        for value in weights:
            self._store(value)
        for value in [*floats, *made]:
            if id(value) in self.halves:
                value.type = ir.TensorType(self.dtype)
            self._match(value)
        self.graph.sort()

    def _wants_half(self, node: ir.Node, index: int) -> bool:
        return node.graph is self.graph and self.wants.get((id(node), index), False)

    def _store(self, weight: ir.Value) -> None:
        """A constant, in the type that is wanted."""
        uses = list(weight.uses())
        halved = [use for use in uses if self._wants_half(*use)]
        if not halved or weight.const_value is None:
            return
        array = halved_array(weight.const_value.numpy(), self.dtype)
        name = f"{weight.name}_{self.suffix}"
        tensor = ir.Tensor(array, dtype=self.dtype, name=name)
        stored = ir.Value(
            name=name, shape=weight.shape, type=ir.TensorType(self.dtype), const_value=tensor
        )
        self.graph.register_initializer(stored)
        for node, index in halved:
            node.replace_input_with(index, stored)
        if len(halved) == len(uses) and not weight.is_graph_output():
            del self.graph.initializers[str(weight.name)]

    def _match(self, value: ir.Value) -> None:
        """Cast a value for those of its uses that want the other type, and for the outputs."""
        is_half = id(value) in self.halves
        others = [
            (node, index)
            for node, index in value.uses()
            if node.op_type not in LENDERS and self._wants_half(node, index) != is_half
        ]
        as_output = value.is_graph_output() and (value.name in self.half_io) != is_half
        if not others and not as_output:
            return
        name = str(value.name)
        other = self._cast(value, to_half=not is_half)
        for node, index in others:
            node.replace_input_with(index, other)
        if as_output:
            outputs = self.graph.outputs
            for index, output in enumerate(outputs):
                if output is value:
                    outputs[index] = other
            value.name, other.name = f"{name}_{self.suffix if is_half else 'fp32'}", name

    def _cast(self, value: ir.Value, *, to_half: bool) -> ir.Value:
        source = value
        if to_half and value.name in self.plan.huge:
            source = self._saturated(value)
        suffix = self.suffix if to_half else "fp32"
        kind = self.dtype if to_half else FLOAT
        return self._node("Cast", [source], f"{value.name}_to_{suffix}", value, kind, to=kind.value)

    def _saturated(self, value: ir.Value) -> ir.Value:
        """Finite numbers within the range; infinities as they are."""
        name = f"{value.name}_within"
        bounds = []
        for end, bound in (("low", -self.cut), ("high", self.cut)):
            tensor = ir.Tensor(np.array(bound, np.float32), name=f"{name}_{end}")
            made = ir.Value(
                name=tensor.name, shape=ir.Shape([]), type=ir.TensorType(FLOAT), const_value=tensor
            )
            self.graph.register_initializer(made)
            bounds.append(made)
        cut = self._node("Clip", [value, *bounds], f"{name}_cut", value, FLOAT)
        blocked = self._node("IsInf", [value], f"{name}_infinite", value, ir.DataType.BOOL)
        return self._node("Where", [blocked, value, cut], name, value, FLOAT)

    def _node(
        self, op: str, inputs: list[ir.Value], name: str, like: ir.Value, dtype: ir.DataType,
        **attributes: int,
    ) -> ir.Value:  # fmt: skip
        output = ir.Value(name=name, shape=like.shape, type=ir.TensorType(dtype))
        node = ir.node(op, inputs, attributes, outputs=[output], name=name)
        self.graph.append(node)
        return output


def halved_array(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """A constant in half; what is out of range becomes half of the largest number."""
    top = largest(dtype)
    finite = np.isfinite(array) & (np.abs(array) > top)
    cut = np.where(finite, np.copysign(top / 2, array), array)
    return np.asarray(cut, np.float32).astype(dtype.numpy())
