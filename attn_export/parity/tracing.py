"""PyTorch's own intermediate values: the exported program run node by node, in float32 and float64.

PyTorch's exporter names the values of its graph after the nodes of the program, and lowering keeps
the names of what it does not replace, so that a name says what a value should be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from attn_export.errors import one_line
from attn_export.exporting.exporter import Graph
from attn_export.models.spec import ExportSpec
from attn_export.parity.eager import fast_path
from attn_export.parity.tolerance import Array
from attn_export.parity.trace import Expected, Trace, expect, samples_for
from attn_export.reference import Case

LIMIT = 2**31  # bytes of weights
See = Callable[[str, Tensor, Tensor], None]


def trace_all(
    graphs: Mapping[str, Graph],
    lowered: Sequence[tuple[str, ir.Model]],
    cases: Sequence[Case],
    progress: Callable[[str], None],
) -> tuple[Trace, list[str]]:
    """What the values of each component should be, case by case; and why some are not known.

    Args:
        lowered: component and graph of each target, whose values are wanted.

    Nothing is kept of a model that is too large to be held twice more, in float64.
    """
    found: Trace = {}
    notes: list[str] = []
    names = {
        component: frozenset(
            str(value.name)
            for owner, model in lowered
            if owner == component
            for node in model.graph
            for value in node.outputs
        )
        & _named(graph.program)
        for component, graph in graphs.items()
    }
    count = samples_for(sum(len(names[case.component]) for case in cases))
    for component, graph in graphs.items():
        if graph.program is None or not names[component]:
            continue
        if _bytes(graph.program) > LIMIT:
            notes.append(f"values inside of {component} are not stored, the model is too large")
            continue
        progress(f"running PyTorch on {component} node by node")
        for case in cases:
            if case.component == component:
                values, problem = trace_case(
                    graph.program, graph.spec, case.inputs, names[component], count
                )
                if problem:
                    notes.append(f"values inside of {component} are not stored ({problem})")
                    break
                found[case.name] = values
    return found, notes


def _named(program: ExportedProgram | None) -> set[str]:
    """Names of the program's nodes as the exporter gives them to values."""
    nodes = program.graph_module.graph.nodes if program is not None else ()
    return {name for node in nodes if node.op == "call_function" for name in _parts(node)}


def _parts(node: fx.Node) -> list[str]:
    """Those of a node; the outputs of a Split are numbered."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return [f"{node.name}_split_{index}" for index in range(len(value))]
    return [node.name]


def _bytes(program: ExportedProgram) -> int:
    return sum(value.nbytes for value in program.state_dict.values())


def trace_case(
    program: ExportedProgram,
    spec: ExportSpec,
    inputs: Mapping[str, Array],
    names: frozenset[str],
    count: int,
) -> tuple[dict[str, Expected], str]:
    """What the named values should be, `count` samples each; and why not, where PyTorch fails.

    Args:
        program: as the exporter decomposed it.
        inputs: by the names of the graph's inputs.
    """
    found: dict[str, Expected] = {}

    def see(name: str, single: Tensor, double: Tensor) -> None:
        if name in names and double.numel():
            found[name] = expect(_numpy(double), _numpy(single), count)

    given = [torch.tensor(inputs[spec.names.get(name, name)]) for name in spec.inputs]
    try:
        with torch.no_grad(), fast_path(enabled=False):
            _run_both(program, given, see)
    except Exception as error:  # whatever an operator raises in float64
        return {}, f"{type(error).__name__}: {one_line(error)}"
    return found, ""


def _run_both(program: ExportedProgram, inputs: list[Tensor], see: See) -> None:
    module = program.graph_module
    arguments = _arguments(program, inputs)
    sides = (fx.Interpreter(module), _Double(module))
    sides[0].args_iter = iter(arguments)
    sides[1].args_iter = iter([_double(value) for value in arguments])
    for node in module.graph.nodes:
        if node.op == "output":
            return
        single, double = (side.run_node(node) for side in sides)
        for side, value in zip(sides, (single, double), strict=True):
            side.env[node] = value
        if node.op == "call_function":
            _show(node.name, single, double, see)
        for side in sides:
            for dead in side.user_to_last_uses.get(node, ()):
                del side.env[dead]


class _Double(fx.Interpreter):
    """Computes in float64 where the program says float32."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, *fx.node.map_aggregate((args, kwargs), _wider))


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _arguments(program: ExportedProgram, inputs: list[Tensor]) -> list[Any]:
    """What the graph's placeholders take: parameters, buffers and constants, then the inputs."""
    rest = iter(inputs)
    arguments: list[Any] = []
    for spec in program.graph_signature.input_specs:
        target = str(spec.target)
        if spec.kind == InputKind.USER_INPUT:
            arguments.append(next(rest))
        elif target in program.state_dict:
            arguments.append(program.state_dict[target])
        else:
            arguments.append(program.constants[target])
    return arguments


def _show(name: str, single: Any, double: Any, see: See) -> None:
    if isinstance(double, Tensor):
        see(name, single, double)
    elif isinstance(double, (list, tuple)):  # the exporter's name for the parts of a Split
        for index, (a, b) in enumerate(zip(single, double, strict=True)):
            if isinstance(b, Tensor):
                see(f"{name}_split_{index}", a, b)


def _numpy(value: Tensor) -> Array:
    value = value.float() if value.dtype == torch.bfloat16 else value
    return np.asarray(value.detach().resolve_conj().numpy())
