"""`trace.safetensors`: what PyTorch computes inside a model, to find where a runtime leaves it.

For each case and each value of the exported graph that has a counterpart in PyTorch: its shape, its
root mean square and largest magnitude, PyTorch's own float32 error, and samples of its float64
truth. All of a small tensor is kept, of a large one places spread over it, so that the file stays
below a megabyte, or little above it for the largest models. Needs numpy and safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from attn_export.errors import FileError, one_line
from attn_export.parity.tolerance import Array, max_abs, rms
from attn_export.storage import write_file

FILE = "trace.safetensors"
TOTAL = 2**16  # samples of a whole file: half a megabyte of float64
LEAST, MOST = 32, 1024  # samples of one value
GOLDEN = 0.6180339887498949  # its multiples are spread evenly over every stretch, and every column


@dataclass(frozen=True)
class Expected:
    """What a value of a graph should be.

    Attributes:
        samples: float64, at `places` of the flattened value.
        error: largest difference of PyTorch's float32 from it, anywhere in the value.
        rms, largest: of the finite numbers of the whole value.
        exact: integers and booleans, which must be equal.
    """

    shape: tuple[int, ...]
    samples: NDArray[np.float64]
    error: float = 0.0
    rms: float = 0.0
    largest: float = 0.0
    exact: bool = False

    @property
    def places(self) -> NDArray[np.int64]:
        return places(int(np.prod(self.shape)), len(self.samples))


Trace = dict[str, dict[str, Expected]]
"""Case -> value -> what it should be."""


def places(size: int, count: int) -> NDArray[np.int64]:
    """`count` indices below `size`, spread without a period; all of them where it has no more."""
    if count >= size:
        return np.arange(size)
    return (np.arange(1, count + 1) * GOLDEN % 1.0 * size).astype(np.int64)


def expect(truth: Array, single: Array | None = None, count: int | None = None) -> Expected:
    """Describe a value by its truth; `single` is the same in float32, `count` how many samples."""
    whole = np.asarray(truth, np.float64).ravel()
    root, largest = _size_of(whole)
    return Expected(
        tuple(truth.shape),
        whole[places(whole.size, whole.size if count is None else count)],
        0.0 if single is None else _distance(single.ravel(), whole),
        root,
        largest,
        truth.dtype.kind in "biu",
    )


def _size_of(whole: NDArray[np.float64]) -> tuple[float, float]:
    """Root mean square and largest magnitude of the finite numbers."""
    square = float(whole @ whole)
    if not 0 < square < float("inf"):  # zeros, infinities, or too small and large to be squared
        whole = whole[np.isfinite(whole)]
        return rms(whole), float(np.max(np.abs(whole), initial=0.0))
    return float(np.sqrt(square / whole.size)), float(max(whole.max(), -whole.min()))


def _distance(single: Array, whole: NDArray[np.float64]) -> float:
    """The largest difference where both are finite."""
    with np.errstate(invalid="ignore"):
        apart = np.subtract(single, whole, dtype=np.float64)
        furthest = float(max(apart.max(initial=0.0), -apart.min(initial=0.0)))
    return furthest if np.isfinite(furthest) else max_abs(np.asarray(single, np.float64), whole)


def samples_for(values: int) -> int:
    """How many samples each of so many values may keep."""
    return min(MOST, max(LEAST, TOTAL // max(values, 1)))


def write_trace(path: Path, trace: Mapping[str, Mapping[str, Expected]]) -> None:
    """Raises FileError where the file could not be written."""
    tensors: dict[str, Array] = {}
    listing: dict[str, list[Any]] = {}
    for case, values in trace.items():
        parts = [value.samples for value in values.values()]
        tensors[case] = np.concatenate(parts) if parts else np.zeros(0)
        listing[case] = [
            [name, list(v.shape), len(v.samples), v.error, v.rms, v.largest, v.exact]
            for name, v in values.items()
        ]
    write_file(path, save(tensors, metadata={"trace": json.dumps(listing)}))


def read_trace(path: Path) -> Trace:
    """Read it back; empty where there is no such file.

    Raises:
        FileError: not a safetensors file, or not one of ours.
    """
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="numpy") as file:
            listing = json.loads((file.metadata() or {})["trace"])
            return {case: _values(rows, file.get_tensor(case)) for case, rows in listing.items()}
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise FileError(
            f"{path} is not a readable trace ({one_line(error)})", "export the bundle again"
        ) from error


def _values(rows: list[Any], samples: NDArray[np.float64]) -> dict[str, Expected]:
    found, start = {}, 0
    for name, shape, count, error, root, largest, exact in rows:
        part = samples[start : start + count]
        value = Expected(tuple(map(int, shape)), part, error, root, largest, bool(exact))
        if len(part) != count or len(value.places) != count:
            raise ValueError(f"value '{name}' has the wrong number of samples")
        found[name] = value
        start += count
    return found
