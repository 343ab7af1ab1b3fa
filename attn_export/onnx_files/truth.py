"""What an .onnx file computes in float64, on ONNX's reference evaluator, in a process of its own.

The evaluator is plain numpy: a convolution may take minutes there, and only a process can be
stopped. `python -m attn_export.onnx_files.truth MODEL INPUTS.npz OUTPUTS.npz` is that process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from attn_export.errors import one_line
from attn_export.parity.tolerance import Array
from attn_export.protos import in_double

SECONDS = 60.0
LIMIT = 2**29  # bytes of weights; in double and with their copies they take five times that


def compute(
    path: Path, cases: Sequence[Mapping[str, Array]], seconds: float = SECONDS
) -> tuple[list[dict[str, Array]], str]:
    """Outputs of each case in float64; none, and why not, where the evaluator cannot or is slow."""
    with tempfile.TemporaryDirectory(prefix="attn-export-") as folder:
        inputs, outputs = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        packed = {f"{i}/{name}": a for i, case in enumerate(cases) for name, a in case.items()}
        np.savez(inputs, allow_pickle=False, **packed)
        command = [sys.executable, "-m", "attn_export.onnx_files.truth", path, inputs, outputs]
        try:
            done = subprocess.run(
                list(map(str, command)), capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return [], f"the reference evaluator takes more than {seconds:g} s"
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
            return [], f"the reference evaluator does not run it ({one_line(Exception(last))})"
        return _unpack(outputs, len(cases)), ""


def _unpack(path: Path, count: int) -> list[dict[str, Array]]:
    found: list[dict[str, Array]] = [{} for _ in range(count)]
    with np.load(path, allow_pickle=False) as arrays:
        for key, array in arrays.items():
            index, _, name = key.partition("/")
            found[int(index)][name] = array
    return found


def _main(path: Path, inputs: Path, outputs: Path) -> None:
    model = onnx.load(path)
    in_double(model)
    evaluator = ReferenceEvaluator(model)
    with np.load(inputs, allow_pickle=False) as arrays:
        given = dict(arrays.items())
    made: dict[str, Array] = {}
    for index in sorted({int(key.partition("/")[0]) for key in given}):
        feeds = {
            key.partition("/")[2]: a.astype(np.float64) if a.dtype.kind == "f" else a
            for key, a in given.items()
            if key.startswith(f"{index}/")
        }
        with np.errstate(all="ignore"):  # blocked rows give NaN on the way
            results = evaluator.run(None, feeds)
        for name, result in zip(evaluator.output_names, results, strict=True):
            made[f"{index}/{name}"] = np.asarray(result)
    np.savez(outputs, allow_pickle=False, **made)


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:]))
