"""`weights.data`: the large constants of every graph of a bundle, each stored once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attn_export.storage import write_errors

ALIGNMENT = 64  # a cache line, and what memory-mapped readers want
THRESHOLD = (
    1024  # bytes; smaller constants stay inside of the graph, where shape inference sees them
)


def write_graphs(folder: Path, graphs: Mapping[str, ir.Model], data: str) -> None:
    """Write `graphs` (file name -> model) with their weights in one shared file.

    Equal tensors of several graphs are written once. The models' tensors are left as they were.

    Raises:
        FileError: the disk is full.
    """
    places: dict[bytes, tuple[int, int]] = {}
    with write_errors(folder), (folder / data).open("wb") as file:
        for name, model in graphs.items():
            kept: list[tuple[ir.Value, ir.TensorProtocol]] = []
            try:
                for graph in model.graphs():
                    for value in graph.initializers.values():
                        tensor = value.const_value
                        if tensor is None or _stays_inside(tensor):
                            continue
                        raw = _raw(tensor)
                        key = hashlib.sha256(raw).digest()
                        if key not in places:
                            file.write(b"\0" * (-file.tell() % ALIGNMENT))
                            places[key] = (file.tell(), len(raw))
                            file.write(raw)
                        kept.append((value, tensor))
                        value.const_value = _external(data, places[key], value, tensor)
                proto = ir.to_proto(model)
            finally:
                for value, tensor in kept:
                    value.const_value = tensor
            (folder / name).write_bytes(proto.SerializeToString())
    if not places:
        (folder / data).unlink()


def _stays_inside(tensor: ir.TensorProtocol) -> bool:
    if tensor.dtype == ir.DataType.STRING:  # protobuf's own form is the only one
        return True
    return tensor.nbytes < THRESHOLD and not isinstance(tensor, ir.ExternalTensor)


def _raw(tensor: ir.TensorProtocol) -> memoryview:
    if tensor.dtype.bitwidth < 8:  # two or four to a byte, which numpy does not have
        return memoryview(tensor.tobytes())
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def _external(
    data: str, place: tuple[int, int], value: ir.Value, tensor: ir.TensorProtocol
) -> ir.ExternalTensor:
    offset, length = place
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(data, offset, length, tensor.dtype, shape=shape, name=str(value.name))
