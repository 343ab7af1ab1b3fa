"""What other tools make of a model: each takes a component and returns a graph with what it fused.

Each gets its best chance: the program that `torch.export` traced with this project's workarounds,
at the opset that the tool's documentation uses, and for onnxruntime.transformers also the
TorchScript export for which it was written, with the number of heads and the width it asks for.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from attn_export.attention.count import ATTENTION_OPS
from attn_export.errors import ExportError
from attn_export.exporting.exporter import OPSET, Traced, convert
from attn_export.exporting.workarounds import missing
from attn_export.graph_names import name_values
from attn_export.models.spec import ExportSpec
from attn_export.outputs import named_tensors

DYNAMO_OPSET, TORCHSCRIPT_OPSET = 18, 17

Fused = tuple[Path, Path, str]
"""The fused graph, the export that it was made from, and how that was made."""


def attentions(path: Path) -> int:
    """Attention nodes of a file, in whichever domain."""
    model = ir.load(path)
    graphs = [*model.graphs(), *(function.graph for function in model.functions.values())]
    nodes = {id(node): node for graph in graphs for node in graph}
    return sum((node.domain, node.op_type) in ATTENTION_OPS for node in nodes.values())


def exporter(traced: Traced, folder: Path, _: str) -> list[Fused]:
    """PyTorch's own lowering at opset 23, where scaled_dot_product_attention is an operator."""
    path = dynamo(traced, folder, OPSET)
    return [(path, path, f"dynamo {OPSET}")]


def onnxscript(traced: Traced, folder: Path, _: str) -> list[Fused]:
    """onnxscript.rewriter.ort_fusions.optimize_for_ort."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    plain, path = dynamo(traced, folder, DYNAMO_OPSET), folder / "onnxscript.onnx"
    fused, _counts = optimize_for_ort(ir.load(plain))
    ir.save(fused, path)
    return [(path, plain, f"dynamo {DYNAMO_OPSET}")]


def onnxruntime(traced: Traced, folder: Path, model_type: str) -> list[Fused]:
    """onnxruntime.transformers.optimizer.optimize_model, on both exports."""
    from onnxruntime.transformers.optimizer import optimize_model

    exports: dict[str, Callable[[], Path]] = {
        f"dynamo {DYNAMO_OPSET}": lambda: dynamo(traced, folder, DYNAMO_OPSET),
        f"torchscript {TORCHSCRIPT_OPSET}": lambda: _torchscript(traced.spec, folder),
    }
    modules = (traced.spec.module, getattr(traced.spec.module, "model", None))
    configs = [module.config for module in modules if hasattr(module, "config")]
    heads = _number(configs, "num_attention_heads", "encoder_attention_heads")
    width = _number(configs, "hidden_size", "d_model")
    found: list[Fused] = []
    problems = []
    for label, export in exports.items():
        try:
            plain = export()
            optimised = optimize_model(
                str(plain),
                model_type=model_type,
                num_heads=heads,
                hidden_size=width if heads else 0,  # both, or it finds them itself
                only_onnxruntime=False,
            )
            path = folder / f"onnxruntime-{label.split()[0]}.onnx"
            optimised.save_model_to_file(str(path))
            found.append((path, plain, label))
        except Exception as error:  # the other export may still work
            problems.append(f"{label}: {type(error).__name__}: {error}")
    if not found:
        raise RuntimeError("; ".join(problems))
    return found


PEERS: dict[str, Callable[[Traced, Path, str], list[Fused]]] = {
    "exporter": exporter,
    "onnxscript": onnxscript,
    "onnxruntime": onnxruntime,
}


def _number(configs: Sequence[Any], *names: str) -> int:
    found = [getattr(config, name, None) for config in configs for name in names]
    return next((value for value in found if isinstance(value, int)), 0)


def dynamo(traced: Traced, folder: Path, opset: int) -> Path:
    """The program at an opset, under its component's names; made once."""
    path = folder / f"opset{opset}.onnx"
    if not path.exists():
        try:
            model = convert(traced.program, opset, missing())
        except ExportError:  # an earlier conversion may leave symbols pending in the program: once
            model = convert(traced.program, opset, missing())
        name_values(model, traced.spec)
        ir.save(model, path)
    return path


class _Positional(nn.Module):
    """Tensors in by position and out as a tuple, which is all that TorchScript can trace."""

    def __init__(self, spec: ExportSpec) -> None:
        super().__init__()
        self.model, self.names = spec.module, list(spec.inputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.model(**dict(zip(self.names, tensors, strict=True)))
        return tuple(tensor for _, tensor in named_tensors(result))


def _torchscript(spec: ExportSpec, folder: Path) -> Path:
    path = folder / "script.onnx"
    names = {name: spec.names.get(name, name) for name in spec.inputs}
    axes = {n: {i: axis.name for i, axis in row.items()} for n, row in spec.axes().items()}
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
