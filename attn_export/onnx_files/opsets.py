"""Convert a graph up to opset 23, where the standard Attention op is.

What changed between opsets, from the ONNX operator changelog; every other operator of opset 11 on
reads the same in 23:

1. 12: Dropout's ratio became an input; it has no effect at inference.
2. 13: axes of Squeeze, Unsqueeze and ReduceSum, and Split's sizes, became inputs; Softmax,
   LogSoftmax and Hardmax normalise one axis instead of all from that axis on.
3. 14: BatchNormalization's outputs for training went to another mode.
4. 16: RoiAlign has another default.
5. 18: axes of the other reductions became inputs; Split without sizes names its number of outputs.
6. 19 to 23: onnxscript's converter (GridSample, DFT, GroupNormalization).

Weights are not touched, so that they stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
from onnxscript.version_converter import convert_version

from attn_export.errors import ExportError, one_line
from attn_export.onnx_files.checks import STANDARD

TARGET = 23
MIDWAY = 18  # where onnxscript's converter begins

Adapter = Callable[[ir.Node], None]


def convert(model: ir.Model) -> None:
    """Bring the model, in place, to opset 23; one that is newer stays.

    Raises:
        ExportError: an operator has no counterpart there.
    """
    version = max((model.opset_imports.get(domain, 0) for domain in STANDARD), default=0)
    model.opset_imports.pop("ai.onnx", None)
    if not version or version >= TARGET:
        if version:
            model.opset_imports[""] = version
        return
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.domain in STANDARD:
            node.domain = ""
            for since, adapt in ADAPTERS.get(node.op_type, ()):
                if version < since:
                    adapt(node)
            if version < MIDWAY:
                _require_known(node)
                node.version = None
    model.opset_imports[""] = max(version, MIDWAY)
    try:
        convert_version(model, TARGET)
    except Exception as error:  # VersionConverterError is not public
        raise ExportError(
            f"opset {version} does not convert to {TARGET} ({one_line(error)})",
            f"export the model again with opset {TARGET}",
        ) from error


def _require_known(node: ir.Node) -> None:
    """Raise ExportError for an attribute that the newer operator no longer has."""
    if not onnx.defs.has(node.op_type):
        return  # ONNX Runtime keeps some operators of its own in ONNX's domain
    schema = onnx.defs.get_schema(node.op_type, MIDWAY)
    gone = [name for name in node.attributes if name not in schema.attributes]
    if gone or schema.deprecated:
        seen = f"with '{gone[0]}' " if gone else ""
        raise ExportError(
            f"{node.op_type} '{node.name}' {seen}has no counterpart in opset {TARGET}",
            f"export the model again with opset {TARGET}",
        )


def _constant(node: ir.Node, role: str, numbers: list[int]) -> ir.Value:
    graph = node.graph
    assert isinstance(graph, ir.Graph)  # functions were inlined
    name = f"{node.outputs[0].name}/{role}"
    tensor = ir.tensor(np.array(numbers, dtype=np.int64), name=name)
    value = ir.Value(
        name=name, shape=ir.Shape([len(numbers)]), type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )  # fmt: skip
    graph.register_initializer(value)
    return value


def _input_for(attribute: str) -> Adapter:
    def adapt(node: ir.Node) -> None:
        found = node.attributes.pop(attribute, None)
        if found is not None:
            numbers = [int(number) for number in found.as_ints()]
            node.resize_inputs(2)
            node.replace_input_with(1, _constant(node, attribute, numbers))

    return adapt


def _softmax(node: ir.Node) -> None:
    """Before 13 it normalised over every axis from `axis` (1 by default) on, taken as one."""
    source, result, graph = node.inputs[0], node.outputs[0], node.graph
    assert source is not None
    assert graph is not None
    axis = node.attributes.get_int("axis", 1)
    rank = None if source.shape is None else len(source.shape)
    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    if axis == -1 or (rank is not None and axis % rank == rank - 1):
        return
    flat = ir.node("Flatten", [source], attributes={"axis": axis}, name=f"{node.name}/flat")
    sizes = ir.node("Shape", [source], name=f"{node.name}/sizes")
    shaped = ir.node("Reshape", [result, sizes.outputs[0]], name=f"{node.name}/shaped")
    for made, role in ((flat, "flat"), (sizes, "sizes"), (shaped, "shaped")):
        made.outputs[0].name = f"{result.name}/{role}"
    shaped.outputs[0].shape, shaped.outputs[0].type = result.shape, result.type
    result.shape = None
    node.replace_input_with(0, flat.outputs[0])
    graph.insert_before(node, [flat, sizes])
    graph.insert_after(node, [shaped])
    ir.convenience.replace_all_uses_with(result, shaped.outputs[0], replace_graph_outputs=True)
    shaped.replace_input_with(0, result)
    if shaped.outputs[0].is_graph_output():
        name = result.name
        result.name, shaped.outputs[0].name = f"{name}/normalised", name


def _split(node: ir.Node) -> None:
    if len(node.inputs) < 2 or node.inputs[1] is None:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


def _inference_only(node: ir.Node) -> None:
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        raise ExportError(
            f"BatchNormalization '{node.name}' is in training mode", "export it in eval mode"
        )
    node.resize_outputs(1)


def _half_pixel(node: ir.Node) -> None:
    mode = "coordinate_transformation_mode"
    node.attributes.setdefault(mode, ir.AttrString(mode, "output_half_pixel"))


def _no_ratio(node: ir.Node) -> None:
    node.attributes.pop("ratio", None)


def _rename(op_type: str) -> Adapter:
    def adapt(node: ir.Node) -> None:
        node.op_type = op_type

    return adapt


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
ADAPTERS: dict[str, tuple[tuple[int, Adapter], ...]] = {
    "Dropout": ((12, _no_ratio),),
    "Squeeze": ((13, _input_for("axes")),),
    "Unsqueeze": ((13, _input_for("axes")),),
    "ReduceSum": ((13, _input_for("axes")),),
    "Split": ((13, _input_for("split")), (18, _split)),
    "Softmax": ((13, _softmax),),
    "LogSoftmax": ((13, _softmax),),
    "Hardmax": ((13, _softmax),),
    "BatchNormalization": ((14, _inference_only),),
    "RoiAlign": ((16, _half_pixel),),
    "Scatter": ((18, _rename("ScatterElements")),),
    **{f"Reduce{kind}": ((18, _input_for("axes")),) for kind in _REDUCTIONS},
}
"""Operator -> what to change where the graph is older than an opset."""
