"""An existing .onnx file of any exporter, as a graph in which attention can be found.

The file and its weights are only read: weights beside the file stay there, mapped into memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx.external_data_helper import ExternalDataInfo
from onnx_ir.passes import common

from attn_export.attention.metadata import MODULE, ORIGIN, name_nodes
from attn_export.errors import ExportError, FileError, one_line
from attn_export.graph_names import origin_of
from attn_export.onnx_files import checks as onnx_checks
from attn_export.onnx_files import opsets, shapes
from attn_export.onnx_files.shapes import Symbols
from attn_export.onnx_files.static_sizes import StaticSizesPass
from attn_export.protos import graph_tensors

KNOWN_DOMAINS = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}
QUANTISED = ("DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QuantizeLinear")
IR_VERSION = 10  # what PyTorch's exporter writes for opset 23


@dataclass
class OnnxFile:
    """What was read.

    Attributes:
        model: the main graph with functions inlined, at opset 23 or newer, sizes inferred.
        opset: of the file; None where it uses none of ONNX's operators.
        weight_files: the files beside it that hold its weights; empty where it holds them itself.
        foreign: domains of operators that neither ONNX nor ONNX Runtime defines.
        notes: what was done or seen that its owner should know.
    """

    path: Path
    model: ir.Model
    opset: int | None
    weight_files: frozenset[Path]
    symbols: Symbols
    foreign: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def weight_bytes(self) -> int:
        """The size of all weights, in bytes."""
        graphs = self.model.graphs()
        tensors = (v.const_value for g in graphs for v in g.initializers.values())
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def read(path: Path) -> OnnxFile:
    """Read a file of opset 11 to 26.

    Raises:
        FileError: it is missing, broken, too old or too new, or its weights are out of place.
        ExportError: an operator has no counterpart in opset 23, or Attention has a window there.
    """
    proto = onnx_checks.load(path)
    version = onnx_checks.opset(proto)
    places = (ExternalDataInfo(t).location for t in graph_tensors(proto) if t.external_data)
    beside = frozenset((path.parent / place).resolve() for place in places)
    for place in beside:
        if (links := place.stat().st_nlink) > 1:  # onnx_ir refuses it in the middle of the work
            raise FileError(
                f"{place} is one of {links} hard links, through which any file may be read",
                "if you trust it, copy both files to one folder with `cp`",
            )
    functions = len(proto.functions)
    model = _graph(path, proto)
    notes = []
    if functions:
        notes.append(f"{functions} model-local functions were inlined")
    _refuse_windows(path, model)
    foreign = _domains(model)
    notes += [f"nodes of {name} are left as they are ({what})" for name, what in foreign.items()]
    if quantised := _quantised(model):
        notes.append(f"quantised nodes are left as they are ({quantised})")
    if overridable := _weights_as_inputs(model):
        notes.append(f"{overridable} weights were inputs as well; they are constants now")
    symbols = shapes.name_symbols(model)
    if version is not None and version < opsets.TARGET:
        shapes.infer(model)  # converting Softmax needs its rank
        opsets.convert(model)
        notes.append(f"opset {version} was converted to {opsets.TARGET}")
    model.ir_version = max(model.ir_version or 0, IR_VERSION)
    if problem := shapes.infer(model):
        notes.append(problem)
    StaticSizesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return OnnxFile(path, model, version, beside, symbols, tuple(foreign), notes)


def _graph(path: Path, proto: onnx.ModelProto) -> ir.Model:
    try:
        model = ir.from_proto(proto)
        ir.external_data.set_base_dir(model.graph, str(path.parent.absolute()))
        common.InlinePass()(model)
        model.functions.clear()
        common.TopologicalSortPass()(model)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    except Exception as error:  # whatever onnx_ir raises on a graph that breaks ONNX's rules
        raise FileError(
            f"{path} is not a sound graph ({one_line(error)})", "mend or export it again"
        ) from error
    name_nodes(model)
    _keep_origins(model)
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes <= shapes.SMALL:
                value.const_value = ir.tensor(tensor.numpy().copy(), name=value.name)
    return model


def _keep_origins(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        module, origin = _origin(node)
        if module:
            node.metadata_props.setdefault(MODULE, module)
        if origin:
            node.metadata_props.setdefault(ORIGIN, origin)


def _origin(node: ir.Node) -> tuple[str, str]:
    """Module and line as PyTorch's exporters note them; the older one has "/blocks.0/attn/Add"."""
    try:
        module, origin = origin_of(node.metadata_props)
    except (ValueError, SyntaxError, TypeError):  # somebody else's notes under the same names
        module, origin = "", ""
    parts = str(node.name).split("/")
    if not module and parts[0] == "":
        module = ".".join(parts[1:-1])
    return module, origin


def _domains(model: ir.Model) -> dict[str, str]:
    """Each foreign domain, with its operators and how often they occur."""
    found: dict[str, Counter[str]] = {}
    for node in model.graph.all_nodes():
        if node.domain not in KNOWN_DOMAINS and not node.domain.startswith("com.microsoft."):
            found.setdefault(node.domain, Counter())[node.op_type] += 1
    return {domain: _counted(operators) for domain, operators in sorted(found.items())}


def _quantised(model: ir.Model) -> str:
    nodes = model.graph.all_nodes()
    return _counted(
        Counter(n.op_type for n in nodes if n.op_type in QUANTISED or n.op_type[:7] == "QLinear")
    )


def _counted(operators: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(operators.items()))


def _refuse_windows(path: Path, model: ir.Model) -> None:
    """ONNX Runtime refuses the window of Attention-25 or inlines it; OpenVINO ignores it."""
    for node in model.graph.all_nodes():
        windows = {"left_window_size", "right_window_size"} & node.attributes.keys()
        if node.op_type == "Attention" and node.domain in onnx_checks.STANDARD and windows:
            raise ExportError(
                f"Attention '{node.name}' of {path} has a window as opset 25 writes it, which no"
                " runtime computes with a fused op",
                "export it with the window in the mask",
            )


def _weights_as_inputs(model: ir.Model) -> int:
    """Weights may be listed as inputs so that callers can replace them; old files list all."""
    before = len(model.graph.inputs)
    common.RemoveInitializersFromInputsPass()(model)
    return before - len(model.graph.inputs)
