"""ExportSpec -> ONNX graph, through torch.export and PyTorch's dynamo-based ONNX exporter."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import onnx_ir as ir
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.onnx import ONNXProgram

from attn_export.errors import ExportError, one_line
from attn_export.exporting.checks import refuse_other_precisions, refuse_randomness
from attn_export.exporting.refusals import refusal, unprinted_graph
from attn_export.exporting.repairs import repair
from attn_export.exporting.workarounds import Translations, traced, translations
from attn_export.graph_names import clean_metadata, name_sizes, name_values
from attn_export.models.spec import Axis, ExportSpec
from attn_export.outputs import named_tensors
from attn_export.signature import default_dynamic

NOISY = ("torch.onnx", "onnxscript", "torch.export", "torch.fx.experimental.symbolic_shapes")
OPSET = 23  # the standard Attention op; ONNX Runtime and TensorRT run 23, and 25 de-fuses it


@dataclass
class Graph:
    """One exported component.

    Attributes:
        model: opset 23, dynamic sizes named as in `spec.dynamic`.
        spec: as given, with its defaults filled in: dynamic axes, output names, widened examples.
        notes: what the owner of the model should know.
        program: as the exporter decomposed it: values of `model` are named after its nodes.
    """

    model: ir.Model
    spec: ExportSpec
    notes: list[str] = field(default_factory=list)
    program: ExportedProgram | None = None


def to_onnx(spec: ExportSpec) -> Graph:
    """Export one component; the module must be in eval mode already.

    Raises:
        ExportError: the model cannot be exported, a declared dimension froze, or dropout stays on.
    """
    with exporter_state():
        traced = trace(spec)
        converted = to_program(traced.program)
        graph = finish(converted.model, traced)
        return replace(graph, program=converted.exported_program)


@dataclass
class Traced:
    """What torch.export saw of a component: `spec` and `notes` are those of Graph."""

    program: ExportedProgram
    spec: ExportSpec
    notes: list[str]


def trace(spec: ExportSpec) -> Traced:
    """The component's program, with a dynamic batch where that works. Errors are `to_onnx`'s."""
    refuse_other_precisions(spec)
    notes: list[str] = []
    declared = spec.dynamic
    spec = completed(spec)
    if not spec.dynamic:
        sizes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in spec.inputs.items())
        notes.append(f"every size is fixed ({sizes}): the inputs share no first axis to vary")
    try:
        program = _trace(spec)
    except ExportError as error:
        if spec.dynamic == declared:
            raise
        spec = replace(spec, dynamic=declared)
        program = _trace(spec)
        notes.append(
            f"the batch is fixed at {_batch(spec.inputs)}, since it could not be made dynamic"
            f" ({error.observed})"
        )
    refuse_randomness(program)
    return Traced(program, spec, notes)


def completed(spec: ExportSpec) -> ExportSpec:
    """The spec with its defaults filled in: a dynamic batch, names of outputs, caches.

    Raises:
        ExportError: the model raises on its example inputs, or returns something else than tensors.
    """
    # A model that draws its own inputs knows its sizes; any other gets a dynamic batch as well.
    dynamic = merged(spec.dynamic, {} if spec.draw else default_dynamic(spec.inputs))
    spec = replace(spec, dynamic=dynamic, inputs=widen(spec.inputs, dynamic))
    spec = replace(spec, outputs=spec.outputs or _names(spec))
    return replace(spec, state=spec.state or _caches(spec))


def finish(model: ir.Model, traced: Traced) -> Graph:
    """Mend a converted graph and give it the component's names."""
    repair(model)
    name_values(model, traced.spec)
    name_sizes(model, traced.spec)
    clean_metadata(model)
    return Graph(model, traced.spec, traced.notes)


def merged(
    declared: Mapping[str, Mapping[int, Axis]], default: Mapping[str, Mapping[int, Axis]]
) -> dict[str, dict[int, Axis]]:
    """The declared axes, and those of the default where axis 0 of no input is declared."""
    if any(0 in axes for axes in declared.values()):
        default = {}
    names = [*declared, *(name for name in default if name not in declared)]
    return {name: {**default.get(name, {}), **declared.get(name, {})} for name in names}


def widen(
    inputs: Mapping[str, Tensor], dynamic: Mapping[str, Mapping[int, Axis]]
) -> dict[str, Tensor]:
    """Repeat examples of size 1 on a dynamic axis: torch.export would take 1 for a constant."""
    widened = dict(inputs)
    for name, axes in dynamic.items():
        for axis, declared in axes.items():
            value = widened[name]
            if value.shape[axis] == 1 and declared.max > 1:
                widened[name] = torch.cat([value, value], dim=axis)
    return widened


@contextmanager
def exporter_state() -> Iterator[None]:
    """No autograd, no nn.TransformerEncoder fast path (an op without an ONNX form), no noise.

    What torch.export logs before it refuses is said by the error.

    Everything is restored, also after an exception.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _names(spec: ExportSpec) -> tuple[str, ...]:
    try:
        names = [name for name, _ in named_tensors(spec.module(**spec.inputs))]
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"the model raised {type(error).__name__} on its example inputs: {one_line(error)}",
            "give inputs that it runs on",
        ) from error
    if not names:
        raise ExportError("the model returned no tensor", "return at least one")
    clashes = set(names) & set(spec.inputs)
    return tuple(f"{name}_out" if name in clashes else name for name in names)


def _caches(spec: ExportSpec) -> tuple[tuple[str, str, int], ...]:
    """(`present.N.key`, `past_key_values.N.key`, 2) for each cache that goes in and comes out."""
    pasts = {name.replace("past_key_values", "present", 1): name for name in spec.names.values()}
    return tuple((output, pasts[output], 2) for output in spec.outputs if output in pasts)


def _trace(spec: ExportSpec) -> ExportedProgram:
    dims = {
        axis.name: Dim(axis.name, min=axis.min, max=axis.max)
        for axes in spec.dynamic.values()
        for axis in axes.values()
    }
    shapes = {
        name: {axis: dims[a.name] for axis, a in spec.dynamic.get(name, {}).items()}
        for name in spec.inputs
    }

    def export() -> ExportedProgram:
        with unprinted_graph():
            return torch.export.export(
                spec.module, (), kwargs=dict(spec.inputs), dynamic_shapes=shapes, strict=False
            )

    try:
        return traced(spec.module, export)
    except Exception as error:
        raise refusal(error) from error


def convert(
    program: ExportedProgram, opset: int = OPSET, table: Translations | None = None
) -> ir.Model:
    """The program as PyTorch's exporter writes it; arguments and errors are `to_program`'s."""
    return to_program(program, opset, table).model


def to_program(
    program: ExportedProgram, opset: int = OPSET, table: Translations | None = None
) -> ONNXProgram:
    """The program as PyTorch's exporter writes it, with the decomposed one that it wrote.

    Args:
        table: ONNX forms of operators in place of the exporter's; `translations()` by default.

    Raises:
        ExportError: it refuses.
    """
    try:
        converted = torch.onnx.export(
            program,
            opset_version=opset,
            dynamo=True,
            verbose=False,
            custom_translation_table=translations() if table is None else table,
        )
    except Exception as error:
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {one_line(cause)}"
        raise ExportError(
            f"PyTorch's ONNX exporter refuses the model ({reason})",
            "replace the operation that it names",
        ) from error
    if converted is None:
        raise ExportError("PyTorch's ONNX exporter returned nothing", "report this model")
    return converted


def _batch(inputs: Mapping[str, Tensor]) -> int:
    return next(value.shape[0] for value in inputs.values() if value.dim())
