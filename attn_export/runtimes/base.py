"""The interface of a runtime: is it available, load, run, placement, close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import UsageError

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class GraphBytes:
    """A serialized model whose weights lie in files of another folder.

    A path cannot say this: ONNX Runtime refuses weights outside of the model's own folder, links
    included.
    """

    data: bytes
    folder: Path

    @property
    def name(self) -> str:
        return "the graph with its intermediate values"


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype name and shape of an input or output; a symbolic size is a string."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Availability:
    """Whether a runtime can work here.

    Attributes:
        observed: what was seen, where it cannot.
        fix: the one thing that helps.
        versions: package name to version.
    """

    runtime: str
    ok: bool
    observed: str = ""
    fix: str = ""
    versions: dict[str, str] = field(default_factory=dict)


class Session(ABC):
    """A loaded model. `run` checks the inputs before the runtime sees them."""

    def __init__(self, runtime: str, inputs: Sequence[TensorSpec]) -> None:
        self.runtime = runtime
        self.inputs = tuple(inputs)

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """Outputs by name.

        Raises:
            UsageError: an input is missing, unknown, or of another dtype, rank or size.
        """
        check_inputs(self.inputs, inputs)
        return self._run(inputs)

    @abstractmethod
    def _run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays: ...

    @abstractmethod
    def placement(self) -> dict[str, int]:
        """Execution provider (or device) to the number of nodes that it runs."""

    @abstractmethod
    def close(self) -> None:
        """Free what the session holds; running it afterwards is an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_inputs(specs: Sequence[TensorSpec], inputs: Mapping[str, NDArray[np.generic]]) -> None:
    """Raise UsageError unless the inputs are those that the model takes."""
    known = {spec.name for spec in specs}
    names = ", ".join(spec.name for spec in specs)
    for name in inputs:
        if name not in known:
            raise UsageError(f"the model has no input '{name}'", f"its inputs are {names}")
    sizes: dict[str, tuple[int, str]] = {}
    for spec in specs:
        if spec.name not in inputs:
            raise UsageError(f"input '{spec.name}' is missing", f"give all of {names}")
        _check_input(spec, inputs[spec.name], sizes)


def _check_input(
    spec: TensorSpec, array: NDArray[np.generic], sizes: dict[str, tuple[int, str]]
) -> None:
    if array.dtype != np.dtype(spec.dtype):
        raise UsageError(
            f"input '{spec.name}' is {array.dtype}, the model takes {spec.dtype}",
            "convert it first",
        )
    wanted = "(" + ", ".join(map(str, spec.shape)) + ")"
    if array.ndim != len(spec.shape):
        raise UsageError(
            f"input '{spec.name}' has shape {array.shape}, the model takes {wanted}",
            f"give it {len(spec.shape)} axes",
        )
    for axis, (size, expected) in enumerate(zip(array.shape, spec.shape, strict=True)):
        if isinstance(expected, str):
            seen, where = sizes.setdefault(expected, (size, spec.name))
            if size != seen:
                raise UsageError(
                    f"'{expected}' is {seen} in input '{where}' and {size} in '{spec.name}'",
                    "give both the same size",
                )
        elif size != expected:
            raise UsageError(
                f"input '{spec.name}' has {size} on axis {axis}, the model takes {wanted}",
                f"give it {expected} there, or export that axis as dynamic",
            )
