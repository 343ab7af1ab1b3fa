"""New nodes of one site, with their shapes, collected before anything is put into the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export.attention.lower.rewrite import initializer
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.sizes import Size, divide, shape_of, sizes

Attribute = int | float | str | list[int]


class Builder:
    """Collects nodes and constants.

    Args:
        prefix: what the names of nodes and constants begin with.
        metadata: given to each node.
        anchors: values whose sizes may be read at run time.
    """

    def __init__(
        self, prefix: str, metadata: Mapping[str, str], anchors: Sequence[ir.Value] = ()
    ) -> None:
        self.prefix = prefix
        self.metadata = dict(metadata)
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self._anchors = [
            (size, value, axis) for value in anchors for axis, size in enumerate(sizes(value))
        ]

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        shape: Sequence[Size] | None = None,
        dtype: ir.DataType | None = None,
        **attributes: Attribute,
    ) -> ir.Value:
        """The first output of a new node; its dtype is that of its first input if not given."""
        node = ir.node(op_type, list(inputs), attributes=attributes or None)
        node.name = f"{self.prefix}/{op_type}_{len(self.nodes)}"
        node.metadata_props.update(self.metadata)
        result = node.outputs[0]
        if shape is not None:
            result.shape = shape_of(shape)
        if dtype is None and inputs and inputs[0] is not None:
            dtype = inputs[0].dtype
        if dtype is not None:
            result.dtype = dtype
        self.nodes.append(node)
        return result

    def constant(self, array: NDArray[np.generic]) -> ir.Value:
        value = initializer(f"{self.prefix}/constant_{len(self.weights)}", array)
        self.weights.append(value)
        return value

    def number(self, number: float, like: ir.Value) -> ir.Value:
        """A scalar of the dtype of another value."""
        dtype = np.dtype(np.float32) if like.dtype is None else like.dtype.numpy()
        return self.constant(np.array(number, dtype=dtype))

    def shape(self, wanted: Sequence[Size], *, infer: bool = False) -> ir.Value:
        """The sizes as a 1-D int64 value, read at run time where they are symbolic.

        Args:
            infer: a reshape takes -1 for one size.

        Raises:
            NotLowerable: a size is not that of any anchor.
        """
        symbolic = [axis for axis, size in enumerate(wanted) if not isinstance(size, int)]
        if not symbolic or (infer and len(symbolic) == 1):
            return self._ints([s if isinstance(s, int) else -1 for s in wanted])
        parts = [self._ints([s]) if isinstance(s, int) else self._size(s) for s in wanted]
        return self.op("Concat", parts, [len(parts)], ir.DataType.INT64, axis=0)

    def _ints(self, numbers: Sequence[int]) -> ir.Value:
        return self.constant(np.array(numbers, dtype=np.int64))

    def _size(self, wanted: Size) -> ir.Value:
        for size, value, axis in self._anchors:
            if size == wanted:
                return self._read(value, axis)
        for size, value, axis in self._anchors:
            if isinstance(size, int):
                continue
            for op, quotient in (("Mul", divide(wanted, size)), ("Div", divide(size, wanted))):
                if isinstance(quotient, int):
                    operands = [self._read(value, axis), self._ints([quotient])]
                    return self.op(op, operands, [1], ir.DataType.INT64)
        raise NotLowerable(Reason.UNKNOWN_SHAPE, f"no value has the size '{wanted}' at run time")

    def _read(self, value: ir.Value, axis: int) -> ir.Value:
        return self.op("Shape", [value], [1], ir.DataType.INT64, start=axis, end=axis + 1)

    def reshape(self, value: ir.Value, wanted: Sequence[Size]) -> ir.Value:
        if sizes(value) == tuple(wanted):
            return value
        before = sizes(value)
        # 0 copies the size at the same place, so that it need not be read.
        copied = [
            0 if not isinstance(size, int) and axis < len(before) and before[axis] == size else size
            for axis, size in enumerate(wanted)
        ]
        return self.op("Reshape", [value, self.shape(copied, infer=True)], wanted)

    def expand(self, value: ir.Value, wanted: Sequence[Size]) -> ir.Value:
        if sizes(value) == tuple(wanted):
            return value
        return self.op("Expand", [value, self.shape(wanted)], wanted)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        if list(perm) == sorted(perm):
            return value
        before = sizes(value)
        return self.op("Transpose", [value], [before[axis] for axis in perm], perm=list(perm))
