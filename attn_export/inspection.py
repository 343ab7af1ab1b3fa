"""The account of a model that is not a bundle yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attn_export.attention.lowering import lower
from attn_export.capability import TARGET_RUNTIMES
from attn_export.errors import FileError, UsageError, one_line

Progress = Callable[[str], None]
PROOF_SIZES = (3, 1)


def runtime_of(target: str) -> str:
    """Raises UsageError for an unknown target."""
    if target not in TARGET_RUNTIMES:
        raise UsageError(f"there is no target '{target}'", f"use {', '.join(TARGET_RUNTIMES)}")
    return TARGET_RUNTIMES[target]


def inspect_file(path: Path, target: str, progress: Progress) -> dict[str, Any]:
    """The sites of an .onnx file; the file is not changed.

    Raises:
        FileError: not an ONNX model.
    """
    runtime = runtime_of(target)
    if not path.is_file():
        raise FileError(f"there is no file {path}", "check the path")
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf's DecodeError is not part of its public interface
        raise FileError(
            f"{path} is not an ONNX model ({one_line(error)})", "give a file that onnx can load"
        ) from error
    symbols = {
        name
        for value in model.graph.inputs
        for size in (value.shape if value.shape is not None else ())
        if isinstance(size, ir.SymbolicDim)
        for name in size.free_symbols()
    }
    sizes = [{str(name): size for name in symbols} for size in PROOF_SIZES]
    return {"model": str(path), **lower(model, runtime, sizes, progress=progress).to_json()}


def inspect_source(origin: str, target: str, progress: Progress) -> list[dict[str, Any]]:
    """The sites of a PyTorch model, exported in memory, one account a component."""
    from attn_export.exporter import to_onnx
    from attn_export.parity.cases import sizes_of
    from attn_export.source import eval_mode, resolve, restore_mode

    runtime = runtime_of(target)
    accounts = []
    for component, spec in resolve(origin).components.items():
        flags = eval_mode(spec.module)
        try:
            progress(f"exporting {component} to ONNX")
            graph = to_onnx(spec)
        finally:
            restore_mode(flags)
        account = lower(graph.model, runtime, sizes_of(graph.spec), progress=progress)
        accounts.append(
            {"model": f"{origin} {component}".removesuffix(" model"), **account.to_json()}
        )
    return accounts
