"""Why a node stays float32 when the rest of its graph becomes float16 or bfloat16.

1. What has no half form or kernel, control flow, and what computes positions, masks and sizes.
2. Normalisations written out: the sums, squares and roots, and what meets them first.
3. Softmax outside of fused ops; not before a product on TensorRT, which fuses the three.
4. Exponentials and logarithms, and the constant beside one: exp(x) - 1 + 1 loses exp(x).
5. What leaves the range: as measured on the stored inputs, with room for inputs four times as
   large; and what a constant out of range reaches, as the numbers of a mask do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from attn_export.attention.data import activations, subgraphs
from attn_export.capability.kernels import TENSORRT
from attn_export.parity.tolerance import Array
from attn_export.precision.kernels import has_kernel, takes
from attn_export.precision.magnitudes import Magnitude
from attn_export.precision.ops import (
    CARRIERS,
    CURVES,
    ELEMENTWISE,
    FIXED,
    FLOAT,
    HEADROOM,
    LAYERS,
    MASK_INPUTS,
    MOVES,
    ROOTS,
    SUMS,
    largest,
)


class Rules:
    """The rules of this module's head, each asked in turn, for one float32 graph."""

    def __init__(
        self, model: ir.Model, dtype: ir.DataType, runtime: str, seen: Mapping[str, Magnitude]
    ) -> None:
        self.dtype, self.runtime = dtype, runtime
        self.opset = model.opset_imports.get("", 23)
        self.limit = largest(dtype) / HEADROOM
        self.name = dtype.name.lower()
        self.data = activations(model.graph)
        self.tolerant = set(_fused_by_tensorrt(model)) if runtime == TENSORRT else set()
        self.huge: dict[int, float | None] = {}
        self.huge_names: set[str] = set()
        self._find_huge(model, seen)
        self.counted = self._counted(model)
        self.sums = self._sums(model)

    def verdict(self, node: ir.Node) -> tuple[str, str] | None:
        """(code, why) for a node that stays float32."""
        if subgraphs(node):
            return "control-flow", "its body stays float32"
        if node.op_type in FIXED:
            return "op", FIXED[node.op_type]
        inputs, outputs = takes(node, self.opset, self.dtype)
        floats = [
            may
            for values, mays in ((node.inputs, inputs), (node.outputs, outputs))
            for value, may in zip(values, mays, strict=False)
            if is_float(value)
        ]
        if not any(floats):
            return "op", f"has no {self.name} form"
        if not has_kernel(node.op_type, self.runtime, self.dtype) and not node.domain:
            return "no-kernel", f"{self.runtime} has no {self.name} kernel for it"
        return (
            self._from_sizes(node)
            or self._from_counts(node)
            or self._out_of_range(node)
            or self._normalises(node)
            or self._softmax(node)
            or self._cancels(node)
        )

    def _from_sizes(self, node: ir.Node) -> tuple[str, str] | None:
        if node.op_type in LAYERS or any(id(output) in self.data for output in node.outputs):
            return None  # a layer is one also where learned queries alone go in
        if node.op_type in MOVES and all(
            v is None or not is_float(v) or _constant(v) is not None for v in node.inputs
        ):
            return None  # a weight that is turned round is still a weight
        return "sizes", "is computed from sizes and constants alone"

    def _from_counts(self, node: ir.Node) -> tuple[str, str] | None:
        outer = node.op_type == "MatMul" and _is_outer(node)
        if node.op_type not in ELEMENTWISE and node.op_type not in MOVES and not outer:
            return None
        if any(v is not None and id(v) in self.counted for v in node.inputs):
            return "index", "computes with whole numbers, such as positions"
        return None

    def _out_of_range(self, node: ir.Node) -> tuple[str, str] | None:
        if node in self.tolerant:
            return None
        mask = MASK_INPUTS.get((node.domain, node.op_type))
        for index, value in enumerate([*node.inputs, *node.outputs]):
            if value is None or id(value) not in self.huge or index == mask:
                continue
            if _constant(value) is not None and node.op_type == "Clip":
                continue  # bounds that nothing reaches
            reached = self.huge[id(value)]
            if reached is None:
                return "mask", "takes or makes constants that block keys, out of range"
            where = "makes" if index >= len(node.inputs) else "takes"
            return "range", f"{where} numbers of {reached:.3g}, {self.name} ends at {self.top:.3g}"
        return None

    @property
    def top(self) -> float:
        return largest(self.dtype)

    def _normalises(self, node: ir.Node) -> tuple[str, str] | None:
        if node.op_type in SUMS:
            return "normalisation", "sums up many terms"
        squares = node.op_type == "Mul" and node.inputs[0] is node.inputs[1]
        if node.op_type in ROOTS or squares:
            return "normalisation", "is part of a norm that is written out"
        met = any(v is not None and id(v) in self.sums for v in node.inputs)
        if met and (node.op_type in ELEMENTWISE or node.op_type == "Clip"):
            return "normalisation", "meets a sum or a mean"
        return None

    def _softmax(self, node: ir.Node) -> tuple[str, str] | None:
        if node.op_type not in ("Softmax", "LogSoftmax") or node in self.tolerant:
            return None
        return "softmax", "stands outside of a fused op"

    def _cancels(self, node: ir.Node) -> tuple[str, str] | None:
        if node.op_type in CURVES:
            return "cancels", "leaves the range or loses small numbers"
        if node.op_type not in ("Add", "Sub"):
            return None
        others = [v for v in node.inputs if v is not None and _constant(v) is None]
        makers = [v.producer() for v in others]
        if len(others) == 1 and makers[0] is not None and makers[0].op_type in CURVES:
            return "cancels", "adds a constant to an exponential, whose small numbers would be lost"
        return None

    def _find_huge(self, model: ir.Model, seen: Mapping[str, Magnitude]) -> None:
        """Values out of range, and what they reach; None where a constant is the cause."""
        found = self.huge
        for graph in model.graphs():
            for value in graph.initializers.values():
                array = _constant(value)
                if is_float(value) and array is not None and _reach(array) > self.limit:
                    found[id(value)] = None
        for node in model.graph:
            carried = node.op_type in CARRIERS and any(
                value is not None and id(value) in found and found[id(value)] is None
                for value in node.inputs
            )
            filled = node.attributes.get("value") if node.op_type == "ConstantOfShape" else None
            if filled is not None and _reach(np.asarray(filled.as_tensor().numpy())) > self.limit:
                carried = True
            for value in node.outputs:
                if not is_float(value):
                    continue
                measured = seen.get(str(value.name))
                if carried:
                    found[id(value)] = None
                elif measured is not None and measured.largest > self.limit:
                    found[id(value)] = measured.largest
                if id(value) in found:
                    self.huge_names.add(str(value.name))

    def _counted(self, model: ir.Model) -> set[int]:
        """Float values that are whole numbers made into floats, and sums and products of those."""
        found: set[int] = set()
        for node in model.graph:
            given = [v for v in node.inputs if v is not None]
            if node.op_type == "Cast":
                kind = given[0].dtype
                whole = (
                    kind is not None and not kind.is_floating_point() and is_float(node.outputs[0])
                )
            else:
                computed = [v for v in given if is_float(v) and id(v) in self.data]
                joins = node.op_type in ELEMENTWISE or node.op_type in MOVES
                joins |= node.op_type == "MatMul" and _is_outer(node)
                whole = joins and bool(computed) and all(id(v) in found for v in computed)
            if whole:
                found |= {id(output) for output in node.outputs if is_float(output)}
        return found

    def _sums(self, model: ir.Model) -> set[int]:
        """Sums and means, and what is computed from them and constants alone."""
        found: set[int] = set()
        for node in model.graph:
            given = [v for v in node.inputs if v is not None and is_float(v)]
            free = [v for v in given if _constant(v) is None]
            steps = ELEMENTWISE | ROOTS | {"Clip", "Squeeze", "Unsqueeze", "Expand", "Reshape"}
            if node.op_type in SUMS or (
                node.op_type in steps and free and all(id(v) in found for v in free)
            ):
                found |= {id(output) for output in node.outputs}
        return found


def _fused_by_tensorrt(model: ir.Model) -> Iterator[ir.Node]:
    """Softmax nodes that stand before a product alone, and the mask's sum before each."""
    for node in model.graph:
        readers = [user for user, _ in node.outputs[0].uses()] if node.outputs else []
        if node.op_type != "Softmax" or not readers:
            continue
        if all(reader.op_type == "MatMul" for reader in readers):
            yield node
            before = node.inputs[0].producer() if node.inputs[0] is not None else None
            if before is not None and before.op_type in ("Add", "Where"):
                yield before


def _is_outer(node: ir.Node) -> bool:
    """A product over one number, as positions by frequencies."""
    left = node.inputs[0]
    return left is not None and left.shape is not None and left.shape[-1] == 1


def is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == FLOAT


def _constant(value: ir.Value) -> Array | None:
    return None if value.const_value is None else value.const_value.numpy()


def _reach(array: Array) -> float:
    values = np.abs(array[np.isfinite(array)]) if array.dtype.kind == "f" else np.zeros(0)
    return float(values.max(initial=0.0))
