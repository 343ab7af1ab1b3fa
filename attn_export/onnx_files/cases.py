"""Inputs on which an existing .onnx file is compared: drawn, and run on the file as it is.

The file says little of what it takes, so sizes are tried until it runs: batch 1 and 3, two lengths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import onnx_ir as ir

from attn_export.attention.sizes import evaluate
from attn_export.errors import AttnExportError, FileError
from attn_export.onnx_files.inputs import draw, is_drawn
from attn_export.onnx_files.onnx_file import OnnxFile
from attn_export.onnx_files.shapes import TELLING
from attn_export.onnx_files.truth import LIMIT, compute
from attn_export.parity.tolerance import FACTOR, Array, allowed_error, max_abs, rms, rounded
from attn_export.reference import Case
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.ort import OrtSession

COMPONENT = "model"
BATCHES = (1, 3)
LENGTHS = ((7, 12), (16, 32), (48, 48), (64, 96), (224, 256))
SIDES = (32, 48, 64, 96, 224)  # of an image, which wants multiples of its strides
CREDIBLE = 2.0**13  # roundings; a thousandth of a float32 output
UNTRIED = ((3, 5), (1, 2))  # batch and length where the file cannot be run


@dataclass
class FileCases:
    """The runs of a file as it was given.

    Attributes:
        cases: with the file's outputs, the truth where there is one, and what is allowed.
        sizes: what the symbolic sizes were in each of them, the smallest last.
        notes: what was left out, and why.
    """

    cases: list[Case] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def build(
    file: OnnxFile, *, judged: bool = True, seed: int = 0, fixed: Mapping[str, int] | None = None
) -> FileCases:
    """Run the file, with optimisations off, on drawn inputs.

    Args:
        judged: with float64 answers and allowances; without, only to learn sizes that it takes.
        fixed: symbolic sizes that must be these.

    Raises:
        FileError: ONNX Runtime refuses the file.
        RuntimeUnavailable: no onnxruntime.
    """
    names = symbols(file.model)
    try:
        session = _open(file)
    except _NotHereError as error:
        untried = [_assign(names, batch, length, spread=1) for batch, length in UNTRIED]
        note = f"the whole graph was not compared: {error}; each site was, on its own"
        return FileCases([], untried, [note])
    with session:
        found = _search(file, session, names, seed, fixed or {})
        if judged and found.cases:
            _judge(file, session, found)
    return found


class _NotHereError(Exception):
    """ONNX Runtime's CPU provider cannot run this file, though nothing is wrong with it."""


def _open(file: OnnxFile) -> OrtSession:
    odd = [v.name for v in file.model.graph.inputs if not is_drawn(v)]
    if odd:
        raise _NotHereError(f"its input '{odd[0]}' is of a kind that is not drawn")
    try:
        return ort_cpu.load(file.path, optimize=False)
    except FileError as error:
        if file.foreign:
            names = ", ".join(file.foreign)
            raise _NotHereError(f"ONNX Runtime has no operators of {names}") from error
        if "NOT_IMPLEMENTED" in error.observed:
            raise _NotHereError(error.observed) from error
        raise FileError(error.observed, "mend or export it again") from error


def symbols(model: ir.Model) -> dict[str, bool]:
    """The symbolic sizes of a graph's inputs, and which are a batch: named so, or on axis 0."""
    inputs = [value for value in model.graph.inputs if value.shape is not None]
    plain = {
        str(size.value): None
        for v in inputs
        for size in v.shape or ()
        if isinstance(size, ir.SymbolicDim) and str(size.value).isidentifier()
    }
    named = {name for name in plain if "batch" in name.lower()}
    first = {str(v.shape[0].value) for v in inputs if v.shape and not isinstance(v.shape[0], int)}
    return {name: name in (named or first) for name in plain}


def _assign(names: Mapping[str, bool], batch: int, length: int, spread: int) -> dict[str, int]:
    """One number for each symbol; with `spread` no two lengths are equal where that can be."""
    sizes: dict[str, int] = {}
    step = 0
    for name, is_batch in names.items():
        sizes[name] = batch if is_batch else max(1, length - step)
        step += 0 if is_batch or not spread else 2
    for name in (name for name in names if "total" in name.lower()):
        parts = [n for n in names if n != name and ("past" in n.lower() or "seq" in n.lower())]
        sizes[name] = sum(sizes[part] for part in parts) or sizes[name]
    return sizes


def _tries(
    names: Mapping[str, bool], index: int, used: Sequence[Mapping[str, int]]
) -> list[dict[str, int]]:
    """Sizes from small to large, at last every pair of sides where there are two lengths.

    Those whose lengths were used before come behind, for files that take no others.
    """
    tried: list[dict[str, int]] = []
    lengths = [name for name, is_batch in names.items() if not is_batch]
    for batch in dict.fromkeys((BATCHES[index], 1, 2)):
        row = [_assign(names, batch, two[index], spread) for two in LENGTHS for spread in (1, 0)]
        if len(lengths) == 2:
            pairs = sorted(product(SIDES, repeat=2), key=max)
            row += [{**row[0], **dict(zip(lengths, pair, strict=True))} for pair in pairs]
        repeats = [any(all(s[n] == old[n] for n in lengths) for old in used) for s in row]
        tried += [sizes for sizes, again in zip(row, repeats, strict=True) if not again]
        tried += [sizes for sizes, again in zip(row, repeats, strict=True) if again]
    return [sizes for at, sizes in enumerate(tried) if sizes not in tried[:at]]


def _search(
    file: OnnxFile,
    session: OrtSession,
    names: Mapping[str, bool],
    seed: int,
    fixed: Mapping[str, int],
) -> FileCases:
    found = FileCases()
    for index in range(len(BATCHES)):
        failure = ""
        for tried in _tries(names, index, found.sizes):
            sizes = {name: fixed.get(name, size) for name, size in tried.items()}
            inputs = draw(file.model, sizes, masked=index > 0, seed=seed + index)
            try:
                outputs = session.run(inputs)
            except AttnExportError as error:
                failure = failure or f"it does not run at {told(sizes)} ({_where(error)})"
                continue
            if _is_degenerate(file.model, sizes) or not all(a.size for a in outputs.values()):
                failure = failure or f"nothing is attended to at {told(sizes)}"
                continue
            label = told(sizes) or f"draw {index + 1}"
            if any(case.name == label for case in found.cases):
                label += f", draw {index + 1}"
            if failure:
                found.notes.append(f"{failure}; compared at {label} instead")
            if sizes not in found.sizes:
                found.sizes.insert(0, sizes)
            found.cases.append(Case(label, COMPONENT, inputs, dict(outputs)))
            break
        else:
            found.notes.append(f"no case of batch {BATCHES[index]}: {failure}")
    if not found.cases:
        found.notes.append("the whole graph was not compared; each site was, on its own")
        found.sizes = [_assign(names, batch, length, spread=1) for batch, length in UNTRIED]
    return found


def _where(error: AttnExportError) -> str:
    """The node that failed, where ONNX Runtime names it."""
    found = re.search(r"while running (\w+) node. Name:'([^']*)'", error.observed)
    return f"{found[1]} '{found[2]}'".removesuffix(" ''") if found else error.observed


def _is_degenerate(model: ir.Model, sizes: Mapping[str, int]) -> bool:
    """Whether some attention would have no queries or keys at all."""
    for node in model.graph:
        if node.op_type not in TELLING or node.outputs[0].shape is None:
            continue
        for size in node.outputs[0].shape:
            try:
                if evaluate(size, sizes) < 1:
                    return True
            except ValueError:  # a size that depends on more than the inputs' sizes
                continue
    return False


def told(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def _judge(file: OnnxFile, session: OrtSession, found: FileCases) -> None:
    """Add truth and allowances: how far the file's own answers move when its inputs are rounded."""
    truths: Sequence[Mapping[str, Array]] = []
    why_not = f"its weights take {file.weight_bytes:,} bytes"
    if file.weight_bytes <= LIMIT:
        truths, why_not = compute(file.path, [case.inputs for case in found.cases])
    if why_not:
        found.notes.append(f"no float64 truth: {why_not}")
    judged = []
    for index, case in enumerate(found.cases):
        truth = dict(truths[index]) if truths else {}
        for name in [name for name, array in truth.items() if not _is_credible(array, case, name)]:
            found.notes.append(
                f"no float64 truth of '{name}' at {case.name}: the reference evaluator differs from"
                " ONNX Runtime by more than rounding explains"
            )
            del truth[name]
        again = session.run(case.inputs)
        wobbled = {n: rounded(a, a.dtype, 0).astype(a.dtype) for n, a in case.inputs.items()}
        moved = session.run(wobbled)
        if any(not np.array_equal(again[n], a, equal_nan=a.dtype.kind == "f")
               for n, a in case.outputs.items()):  # fmt: skip
            found.notes.append("the whole graph was not compared: the file draws random numbers")
            found.cases = []
            return
        outputs, allowed = {}, {}
        for name, array in case.outputs.items():
            if array.dtype.kind == "f" and array.size and not np.isfinite(array).any():
                found.notes.append(f"output '{name}' has no finite number at {case.name}")
                continue
            spread = _distance(moved[name], array)
            outputs[name] = array
            allowed[name] = {"all": max(allowed_error(array, truth.get(name)), FACTOR * spread)}
        if outputs:
            judged.append(Case(case.name, COMPONENT, case.inputs, outputs, truth, allowed))
    found.cases = judged


def _is_credible(truth: Array, case: Case, name: str) -> bool:
    """Some operators of the evaluator are wrong; a wrong truth would allow anything."""
    reference = case.outputs[name]
    if reference.dtype.kind != "f":
        return True
    eps = float(np.finfo(np.dtype(reference.dtype.name)).eps)
    given = np.asarray(reference, np.float64)
    same = truth.shape == reference.shape
    return same and max_abs(given, np.asarray(truth, np.float64)) <= CREDIBLE * eps * rms(
        given[np.isfinite(given)]
    )


def _distance(a: Array, b: Array) -> float:
    if a.dtype.kind != "f" or a.shape != b.shape:
        return 0.0
    return max_abs(np.asarray(a, np.float64), np.asarray(b, np.float64))
