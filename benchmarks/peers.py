"""What other tools make of a model: each takes a component and returns a graph with what it fused.

Each gets its best chance: the program that `torch.export` traced with this project's workarounds,
at the opset that the tool's documentation uses, and for onnxruntime.transformers also the
TorchScript export for which it was written, with the number of heads and the width it asks for.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from attn_export.attention.count import ATTENTION_OPS
from attn_export.export_workarounds import translations
from attn_export.exporter import exporter_state
from attn_export.graph_names import name_values
from attn_export.models.spec import ExportSpec
from attn_export.outputs import named_tensors

DYNAMO_OPSET, TORCHSCRIPT_OPSET = 18, 17

Fused = tuple[Path, str]
"""The fused graph, and the export that it was made from."""


def attentions(path: Path) -> int:
    """Attention nodes of a file, in whichever domain."""
    model = ir.load(path)
    graphs = [*model.graphs(), *(function.graph for function in model.functions.values())]
    nodes = {id(node): node for graph in graphs for node in graph}
    return sum((node.domain, node.op_type) in ATTENTION_OPS for node in nodes.values())


def plain_export(spec: ExportSpec, program: ExportedProgram, folder: Path, _: str) -> list[Fused]:
    """PyTorch's own lowering at opset 23, where scaled_dot_product_attention is an operator."""
    return [(_dynamo(spec, program, folder / "opset23.onnx", 23), "dynamo 23")]


def onnxscript(spec: ExportSpec, program: ExportedProgram, folder: Path, _: str) -> list[Fused]:
    """onnxscript.rewriter.ort_fusions.optimize_for_ort."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model = ir.load(_dynamo(spec, program, folder / "opset18.onnx", DYNAMO_OPSET))
    fused, _counts = optimize_for_ort(model)
    path = folder / "onnxscript.onnx"
    ir.save(fused, path)
    return [(path, f"dynamo {DYNAMO_OPSET}")]


def onnxruntime(
    spec: ExportSpec, program: ExportedProgram, folder: Path, model_type: str
) -> list[Fused]:
    """onnxruntime.transformers.optimizer.optimize_model, on both exports."""
    from onnxruntime.transformers.optimizer import optimize_model

    exports: dict[str, Callable[[], Path]] = {
        f"dynamo {DYNAMO_OPSET}": lambda: _dynamo(
            spec, program, folder / "opset18.onnx", DYNAMO_OPSET
        ),
        f"torchscript {TORCHSCRIPT_OPSET}": lambda: _torchscript(spec, folder / "script.onnx"),
    }
    config = getattr(spec.module, "config", None) or getattr(
        getattr(spec.module, "model", None), "config", None
    )
    heads = _number(config, "num_attention_heads", "encoder_attention_heads")
    width = _number(config, "hidden_size", "d_model")
    found: list[Fused] = []
    problems = []
    for label, export in exports.items():
        try:
            optimised = optimize_model(
                str(export()),
                model_type=model_type,
                num_heads=heads,
                hidden_size=width,
                only_onnxruntime=False,
            )
            path = folder / f"onnxruntime-{label.split()[0]}.onnx"
            optimised.save_model_to_file(str(path))
            found.append((path, label))
        except Exception as error:  # the other export may still work
            problems.append(f"{label}: {type(error).__name__}: {error}")
    if not found:
        raise RuntimeError("; ".join(problems))
    return found


PEERS: dict[str, Callable[[ExportSpec, ExportedProgram, Path, str], list[Fused]]] = {
    "exporter": plain_export,
    "onnxscript": onnxscript,
    "onnxruntime": onnxruntime,
}


def _number(config: Any, *names: str) -> int:
    found = [getattr(config, name, None) for name in names]
    return next((value for value in found if isinstance(value, int)), 0)


def _dynamo(spec: ExportSpec, program: ExportedProgram, path: Path, opset: int) -> Path:
    if not path.exists():
        with exporter_state():
            made = torch.onnx.export(
                program,
                opset_version=opset,
                dynamo=True,
                verbose=False,
                custom_translation_table=translations(),
            )
        if made is None:
            raise RuntimeError("PyTorch's exporter returned nothing")
        name_values(made.model, spec)
        ir.save(made.model, path)
    return path


class _Positional(nn.Module):
    """Tensors in by position and out as a tuple, which is all that TorchScript can trace."""

    def __init__(self, spec: ExportSpec) -> None:
        super().__init__()
        self.model, self.names = spec.module, list(spec.inputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.model(**dict(zip(self.names, tensors, strict=True)))
        return tuple(tensor for _, tensor in named_tensors(result))


def _torchscript(spec: ExportSpec, path: Path) -> Path:
    names = {name: spec.names.get(name, name) for name in spec.inputs}
    axes = {n: {i: axis.name for i, axis in row.items()} for n, row in spec.axes().items()}
    with exporter_state():
        torch.onnx.export(
            _Positional(spec).eval(),
            tuple(spec.inputs.values()),
            str(path),
            dynamo=False,
            opset_version=TORCHSCRIPT_OPSET,
            input_names=list(names.values()),
            output_names=list(spec.outputs),
            dynamic_axes=axes,
        )
    return path


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The peers print and log as they work."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
