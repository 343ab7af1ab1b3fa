"""The account of a model that is not a bundle yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attn_export.attention.caveats import causal_notes
from attn_export.attention.lowering import lower
from attn_export.attention.padding import declare, promised, unused_promises
from attn_export.capability import TARGET_RUNTIMES
from attn_export.errors import UsageError
from attn_export.onnx_files import cases as file_cases
from attn_export.onnx_files import onnx_file
from attn_export.onnx_files.cases import FileCases
from attn_export.onnx_files.onnx_file import OnnxFile
from attn_export.precision.names import check_target, lowering_options, parse_precisions
from attn_export.right_padded import REMOVE_PADDING, parse
from attn_export.tuning import cache as caches

Progress = Callable[[str], None]


def runtime_of(target: str, precision: str = "fp32") -> str:
    """Raises UsageError for an unknown target, or one that is not built in that precision."""
    if target not in TARGET_RUNTIMES:
        raise UsageError(f"there is no target '{target}'", f"use {', '.join(TARGET_RUNTIMES)}")
    (wanted,) = parse_precisions(precision)
    check_target(target, wanted)
    return TARGET_RUNTIMES[target]


def inspect_file(
    path: Path,
    target: str,
    progress: Progress,
    right_padded: Sequence[str] = (),
    precision: str = "fp32",
    remove_padding: Sequence[str] = (),
) -> dict[str, Any]:
    """The sites of an .onnx file, and notes on it; the file is not changed.

    Raises:
        FileError: a bad file.
        ExportError: an operator has no counterpart in opset 23.
    """
    runtime = runtime_of(target, precision)
    progress(f"reading {path}")
    file = onnx_file.read(path)
    removed = parse(remove_padding, REMOVE_PADDING)
    declare(file.model, {**parse(right_padded), **removed}, removed)
    cases = file_cases.build(file, judged=False)
    account, notes = account_of(file, cases, runtime, "auto", progress, precision=precision)
    return {**account, "notes": notes}


def account_of(
    file: OnnxFile,
    cases: FileCases,
    runtime: str,
    lowering: str,
    progress: Progress,
    *,
    precision: str = "fp32",
    less_work: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """Lower the file's graph in place; the sites as `inspect --json` prints them, and all notes."""
    options = lowering_options(precision)
    found = lower(
        file.model, runtime, cases.sizes, lowering, progress,
        less_work=less_work, order=caches.order(runtime), **options,
    )  # fmt: skip
    notes = [*file.notes, *cases.notes, *causal_notes(found)]
    notes += unused_promises(found, promised(file.model))
    if found.total == 0:
        notes.append("there is no attention in this file")
    return {"model": str(file.path), **found.to_json()}, notes


def inspect_source(
    origin: str,
    target: str,
    progress: Progress,
    right_padded: Sequence[str] = (),
    precision: str = "fp32",
    remove_padding: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The sites of a PyTorch model, exported in memory, one account a component."""
    from attn_export.exporting.exporter import to_onnx
    from attn_export.parity.drawing import sizes_of
    from attn_export.source import eval_mode, promise, resolve, restore_mode

    runtime = runtime_of(target, precision)
    accounts = []
    source = resolve(origin)
    promise(source, parse(right_padded), parse(remove_padding, REMOVE_PADDING))
    for component, spec in source.components.items():
        flags = eval_mode(spec.module)
        try:
            progress(f"exporting {component} to ONNX")
            graph = to_onnx(spec)
            declare(graph.model, spec.promises(), spec.removed())
        finally:
            restore_mode(flags)
        options = lowering_options(precision)
        sizes = sizes_of(graph.spec)
        order = caches.order(runtime)
        account = lower(graph.model, runtime, sizes, progress=progress, order=order, **options)
        accounts.append(
            {"model": f"{origin} {component}".removesuffix(" model"), **account.to_json()}
        )
    return accounts
