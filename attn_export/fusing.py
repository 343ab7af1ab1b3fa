"""An existing .onnx file with its attention fused: read, lowered, compared as a whole, written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx.external_data_helper import ExternalDataInfo

from attn_export.attention.padding import declare, masked_by_padding, promised
from attn_export.errors import AttnExportError, CheckFailed, FileError, UsageError
from attn_export.inspection import account_of, runtime_of
from attn_export.onnx_files import cases as file_cases
from attn_export.onnx_files import onnx_file
from attn_export.onnx_files.cases import FileCases
from attn_export.onnx_files.onnx_file import OnnxFile
from attn_export.parity.compare import Comparison, compare_outputs, failed
from attn_export.parity.judge import kept, masked_allowances
from attn_export.parity.result import RuntimeResult, Verification
from attn_export.parity.rules import Rule
from attn_export.protos import graph_tensors
from attn_export.requirement import Requirement, parse
from attn_export.right_padded import REMOVE_PADDING
from attn_export.right_padded import parse as parse_promises
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.packages import onnxruntime_owner
from attn_export.storage import publish, scratch
from attn_export.weights import write_graphs

Progress = Callable[[str], None]
INLINE_LIMIT = 10**9  # bytes of weights that still go into the .onnx file itself


@dataclass(frozen=True)
class Fused:
    """What became of a file.

    Attributes:
        output: the new file; None where a check said no, and then nothing was written.
        account: the sites, as `inspect --json` prints them.
        verification: the new graph against the given one; None where that could not be run.
        failure: the check that said no.
    """

    output: Path | None
    account: dict[str, Any]
    notes: list[str]
    verification: Verification | None
    failure: CheckFailed | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The `fuse --json` object."""
        return {
            **self.account,
            "output": str(self.output) if self.output else None,
            "notes": self.notes,
            "verify": self.verification.to_json() if self.verification else None,
        }

    def require(self) -> None:
        """Raise CheckFailed where a check said no."""
        if self.failure is not None:
            raise self.failure


def fuse(
    source: Path | str,
    output: Path | str,
    *,
    target: str = "cpu",
    require: str | int | None = None,
    excuse: Sequence[str] = (),
    allow_blocked_rows: bool = False,
    lowering: str = "auto",
    less_work: bool = True,
    right_padded: Sequence[str] = (),
    remove_padding: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Fused:
    """Write `source` with its attention sites as fused ops, once it computes what it did before.

    `source` and its weights are never changed. Weights go beside `output`, as OUTPUT.data, where
    those of `source` lie beside it or take more than 1 GB.

    Args:
        require: "all" sites lowered or excused, or at least so many lowered.
        excuse: names of sites, or reason codes (attn_export.attention.reasons).
        lowering: "auto", "contrib", "standard" or "decomposed".
        less_work: take out what reaches no output, as a last block's other tokens.
        right_padded: `INPUT`, a mask (B, T) whose rows are ones and then zeros, so that ops may get
            lengths in its place; `INPUT=0` where 0 is what keeps a key. The file's metadata says
            so; nothing checks it when the file runs.
        remove_padding: such a mask (B, S) whose padding does not count: it is not computed where
            that is proved to change nothing else, and outputs (B, S, ...) are 0 there.

    Raises:
        CheckFailed: too few sites were lowered, or the new graph computes something else. Nothing
            is written then.
        UsageError: an unknown target or option, or an output that exists or is the source.
        FileError: a bad file, or an output that could not be written.
        ExportError: an operator has no counterpart in opset 23.
        RuntimeUnavailable: no onnxruntime to prove on.
    """
    requirement = parse(require, excuse, allow_blocked_rows)
    fused = attempt(
        Path(source),
        Path(output),
        target,
        lowering,
        requirement,
        overwrite,
        progress,
        right_padded,
        less_work=less_work,
        remove_padding=remove_padding,
    )
    fused.require()
    return fused


def attempt(
    source: Path,
    output: Path,
    target: str,
    lowering: str,
    requirement: Requirement,
    overwrite: bool,
    progress: Progress,
    right_padded: Sequence[str] = (),
    *,
    less_work: bool = True,
    remove_padding: Sequence[str] = (),
) -> Fused:
    """As `fuse`, but a check that says no is part of the result."""
    runtime = runtime_of(target)
    onnxruntime_owner()  # fail before the long part
    _check_output(output, overwrite)
    progress(f"reading {source}")
    file = onnx_file.read(source)
    if {output.resolve(), _data_of(output).resolve()} & {source.resolve(), *file.weight_files}:
        raise UsageError(f"{output} would replace the file that is read", "choose another -o")
    removed = parse_promises(remove_padding, REMOVE_PADDING)
    declare(file.model, {**parse_promises(right_padded), **removed}, removed)
    masked = masked_by_padding(file.model)
    progress("running the file as it is")
    cases = file_cases.build(file)
    account, notes = account_of(file, cases, runtime, lowering, progress, less_work=less_work)
    notes += requirement.unused([account])
    if removed or any(site["mask"] == "lengths" for site in account["sites"]):
        told = ", ".join(f"'{name}'" for name in promised(file.model))
        notes.append(f"nothing checks when the file runs that {told} is right padded")
    if failure := requirement.failure([account]):
        return Fused(None, account, notes, None, failure)
    with scratch(output) as stage:
        progress("writing")
        names = _write(file, stage, output.name)
        verification = None
        if cases.cases:
            progress("comparing the whole graph")
            verification, note = _compare(stage / output.name, cases, runtime, masked)
            notes += [note] if note else []
        if verification is not None and not verification.passed:
            found = verification.runtimes[ort_cpu.NAME].failures[0]
            failure = CheckFailed(
                f"the fused graph differs from {source}, {found}", "report this file"
            )
            return Fused(None, account, notes, verification, failure)
        publish(stage, output.parent, names, _stale(output))
    return Fused(output, account, notes, verification)


def _check_output(output: Path, overwrite: bool) -> None:
    if output.is_dir():
        raise UsageError(f"{output} is a folder", "name a file with -o")
    for path in (output, _data_of(output)):
        if path.exists() and not overwrite:
            raise UsageError(f"{path} exists", "choose another -o, or add --overwrite")


def _data_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.data")


def _stale(output: Path) -> tuple[str, ...]:
    """The older output's weights, which nothing else reads."""
    data = _data_of(output)
    try:
        older = onnx.load(output, load_external_data=False)
    except Exception:  # no file, or none that says where its weights are
        return ()
    places = {ExternalDataInfo(t).location for t in graph_tensors(older) if t.external_data}
    return (data.name,) if data.name in places else ()


def _write(file: OnnxFile, folder: Path, name: str) -> list[str]:
    """Write the model; the names of its files, the graph last."""
    file.symbols.restore(file.model)
    if not file.weight_files and file.weight_bytes <= INLINE_LIMIT:
        (folder / name).write_bytes(ir.to_proto(file.model).SerializeToString())
        return [name]
    data = _data_of(Path(name)).name
    write_graphs(folder, {name: file.model}, data)
    return [data, name] if (folder / data).exists() else [name]


def _compare(
    path: Path, cases: FileCases, runtime: str, masked: Mapping[str, str]
) -> tuple[Verification | None, str]:
    """The comparison, and a note where it is a stand-in for the runtime that the file is for."""
    if runtime == ort_cpu.NAME:
        return compare_file(path, cases, masked), ""
    try:
        stand_in = f"the whole graph was compared on {ort_cpu.NAME}, a stand-in for {runtime}"
        return compare_file(path, cases, masked), stand_in
    except FileError as error:  # a graph for another runtime may use what this one has not
        return None, f"the whole graph was not compared: {error.observed}"


def compare_file(
    path: Path, cases: FileCases, masked: Mapping[str, str] | None = None
) -> Verification:
    """The answers of a file, with optimisations off, against those of the given one.

    Args:
        masked: as `masked_by_padding` gives it.
    """
    rules = {name: Rule(mask=told) for name, told in (masked or {}).items()}
    comparisons: list[tuple[str, Comparison]] = []
    with ort_cpu.load(path, optimize=False) as session:
        for case in cases.cases:
            try:
                outputs: Mapping[str, Any] = session.run(case.inputs)
            except AttnExportError as error:
                comparisons += [(case.name, failed(n, error.observed)) for n in case.outputs]
                continue
            wanted = {name: array for name, array in outputs.items() if name in case.outputs}
            allowed = masked_allowances(case, rules)
            keep = kept(case.inputs, rules)
            results = compare_outputs(wanted, case.outputs, allowed, case.truth, {}, keep)
            comparisons += [(case.name, result) for result in results]
        placement = session.placement()
    names = tuple(case.name for case in cases.cases)
    return Verification(
        names,
        {ort_cpu.NAME: RuntimeResult(ort_cpu.NAME, tuple(comparisons), placement)},
        masked=masked or {},
    )
