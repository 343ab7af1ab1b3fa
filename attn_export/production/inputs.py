"""What a caller passes -> numpy arrays that the bundle takes, or one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import InputError, one_line
from attn_export.runtimes.base import TensorSpec, check_inputs

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Signature:
    """What a component takes.

    Attributes:
        ranges: name of a dynamic size -> its smallest and largest value.
    """

    inputs: tuple[TensorSpec, ...]
    ranges: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, manifest: Mapping[str, Any], component: str) -> Signature:
        entries = [entry for entry in manifest["inputs"] if entry["component"] == component]
        specs = [TensorSpec(e["name"], e["dtype"], tuple(e["shape"])) for e in entries]
        ranges = {
            size: (int(least), int(most))
            for entry in entries
            for size, (least, most) in entry.get("ranges", {}).items()
        }
        return cls(tuple(specs), ranges)

    def arrays(self, given: Mapping[str, Any]) -> dict[str, Array]:
        """Numpy arrays of the right names, dtypes and sizes; nothing is converted or copied.

        Args:
            given: numpy arrays, or objects in host memory with DLPack's protocol (a torch tensor).

        Raises:
            InputError: an input is missing, unknown, no array, or of another dtype, rank or size.
        """
        arrays = as_arrays(given)
        check_inputs(self.inputs, arrays, self.ranges)
        return arrays


def as_arrays(given: Mapping[str, Any]) -> dict[str, Array]:
    """Raise InputError unless these are arrays by name."""
    if not isinstance(given, Mapping):
        raise InputError(
            f"the inputs are a {type(given).__name__}", "give a dict of arrays by name"
        )
    return {name: as_array(name, value) for name, value in given.items()}


def as_array(name: str, value: Any) -> Array:
    """A view of a numpy array or of a DLPack object in host memory.

    Raises:
        InputError: it is neither, lies on a device, or has a dtype that numpy does not have.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"input '{name}' is a masked array", "fill it first")
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if not hasattr(value, "__dlpack__"):
        raise InputError(f"input '{name}' is a {type(value).__name__}", "give a numpy array")
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # as the producer likes
        raise InputError(
            f"input '{name}' is a {type(value).__name__} that numpy cannot read"
            f" ({one_line(error)})",
            "give a numpy array in host memory",
        ) from error
