"""An existing .onnx file as a bundle, for as long as it is measured.

Its reference is the file itself on ONNX Runtime's CPU provider with optimisations off, on drawn
inputs: what is timed must give the same answers with optimisations on, and on other runtimes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attn_export import bundle as bundles
from attn_export.capability import TARGETS
from attn_export.errors import FileError
from attn_export.onnx_files import cases as file_cases
from attn_export.onnx_files import onnx_file
from attn_export.onnx_files.cases import COMPONENT
from attn_export.parity.tolerance import FACTOR, FLOOR
from attn_export.reference import write_cases
from attn_export.runtimes.packages import versions
from attn_export.weights import write_graphs

MODEL = "model.onnx"


@contextmanager
def file_bundle(
    path: Path, source: str | None, progress: Callable[[str], None]
) -> Iterator[bundles.Bundle]:
    """The file, byte for byte in its weights and node for node, with cases that it was run on.

    Args:
        source: the PyTorch model that it came from, where there is one to time beside it.

    Raises:
        FileError: a bad file, or one that could not be run, so that nothing can be compared.
        ExportError: an operator has no counterpart in opset 23, so that its sizes are not known.
    """
    progress(f"reading {path}")
    file = onnx_file.read(path)
    progress("running the file as it is")
    cases = file_cases.build(file)
    if not cases.cases:
        why = "; ".join(cases.notes) or "it could not be run"
        raise FileError(f"the answers of {path} cannot be checked ({why})", "bench a bundle of it")
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        write_graphs(stage, {MODEL: ir.load(path)}, bundles.WEIGHTS)
        write_cases(stage / bundles.REFERENCE, cases.cases, {COMPONENT: {}})
        bundles.seal(stage, _manifest(path, source, file.model.graph, [*file.notes, *cases.notes]))
        yield bundles.read(stage)


def _manifest(path: Path, source: str | None, graph: ir.Graph, notes: list[str]) -> dict[str, Any]:
    account = {"sites": [], "total": 0, "recognised": 0, "lowered": 0, "refused": 0}
    targets = [
        {
            "name": name, "runtime": target.runtime, "component": COMPONENT, "precision": "fp32",
            "file": MODEL, **account, "tolerance": {"factor": FACTOR, "floor": FLOOR},
        }
        for name, target in TARGETS.items()
    ]  # fmt: skip
    return {
        "name": path.name,
        "source": source or str(path),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "components": [COMPONENT],
        "inputs": [_tensor(value) for value in graph.inputs],
        "outputs": [_tensor(value) for value in graph.outputs],
        "targets": targets,
        "notes": notes,
    }


def _tensor(value: ir.Value) -> dict[str, Any]:
    sizes = [] if value.shape is None else list(value.shape)
    shape = [s if isinstance(s, int) else str(s.value or f"{value.name}_{i}")
             for i, s in enumerate(sizes)]  # fmt: skip
    dtype = value.dtype.numpy().name if value.dtype is not None else "unknown"
    return {"name": value.name, "component": COMPONENT, "dtype": dtype, "shape": shape}
