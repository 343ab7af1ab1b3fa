"""The interface of a runtime: is it available, load, run, placement, close.

A runtime is a module with `NAME`, `GRAPHS`, `availability()` and `load(...)`, as `Runtime` says;
`table.py` lists them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from attn_export import right_padded
from attn_export.errors import InputError, RuntimeUnavailable, UsageError
from attn_export.fixed_caches import FixedCaches
from attn_export.right_padded import Promises

Arrays = dict[str, NDArray[np.generic]]
LEVELS = ("all", "extended", "basic", "off")
"""How far ONNX Runtime optimises a graph; "all" also changes layouts, convolutions to NCHWc."""


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


Graph = Path | bytes | GraphBytes
"""A path with the weights beside it, or a serialized model."""


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
        libraries: shared library that it needs -> where it was found, None where it was not.
        device: what it computes on.
        driver: of that device.
    """

    runtime: str
    ok: bool
    observed: str = ""
    fix: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str | None] = field(default_factory=dict)
    device: str = ""
    driver: str = ""

    def require(self) -> None:
        """Raise RuntimeUnavailable where it cannot work."""
        if not self.ok:
            raise RuntimeUnavailable(
                f"{self.runtime} is not available because {self.observed}", self.fix
            )


@dataclass(frozen=True)
class LoadOptions:
    """What a target asks of the runtime that loads its graph; each takes what concerns it.

    Attributes:
        ranges: symbolic size -> its smallest and largest value.
        cache: folder for what is compiled once a machine, such as TensorRT's engines.
        provider: options of the execution provider, over those that the runtime chooses.
        allow_fallback: attention nodes may run on another provider than the one asked for.
        trace: folder for a record of every node that ran, written when the session is closed;
            slower, and the log is long.
        spinning: idle threads of ONNX Runtime's CPU pool look for work for a while before they
            sleep; as ONNX Runtime has it, which is on, where it is None.
        level: of ONNX Runtime's graph optimisation, one of LEVELS; its highest where it is empty.
        without: optimisers of ONNX Runtime that are left out, by its names for them.
    """

    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cache: Path | None = None
    provider: Mapping[str, str] = field(default_factory=dict)
    allow_fallback: bool = False
    trace: Path | None = None
    spinning: bool | None = None
    level: str = ""
    without: tuple[str, ...] = ()


DEFAULTS = LoadOptions()


@dataclass(frozen=True)
class Placed:
    """A node of the graph and the execution provider that it was given to."""

    provider: str
    domain: str
    op: str
    name: str


class Session(ABC):
    """A loaded model. `run` checks the inputs before the runtime sees them.

    Attributes:
        right_padded: what a bundle's owner promised of its masks.
        caches: those of a fixed capacity among its inputs.
    """

    def __init__(
        self,
        runtime: str,
        inputs: Sequence[TensorSpec],
        ranges: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """`ranges` bounds the symbolic sizes of the inputs, where they are bounded.

        `fallback` is a clause on attention that another provider runs, where that was allowed.
        """
        self.runtime = runtime
        self.inputs = tuple(inputs)
        self.ranges = dict(ranges or {})
        self.right_padded: Promises = {}
        self.caches: FixedCaches | None = None
        self.fallback = ""
        self.closed = False

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """Outputs by name.

        Raises:
            InputError: an input is missing, unknown, or of another dtype, rank or size, or of
                one out of range; or a mask that the model takes for right padded is not.
            UsageError: the session is closed.
        """
        self.require_open()
        check_inputs(self.inputs, inputs, self.ranges)
        right_padded.check(self.right_padded, inputs)
        if self.caches is not None:
            self.caches.check(inputs)
        return self._run(inputs)

    def require_open(self) -> None:
        """Raise UsageError where the session is closed."""
        if self.closed:
            raise UsageError(f"this {self.runtime} session is closed", "load the model again")

    @abstractmethod
    def _run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays: ...

    @abstractmethod
    def placement(self) -> dict[str, int]:
        """Execution provider (or device) to the number of nodes that it runs."""

    def nodes(self) -> Sequence[Placed]:
        """Where each node went, by what the runtime recorded; nothing where it records nothing."""
        return ()

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of other processes that do its work."""
        return ()

    def close(self) -> None:
        """Free what the session holds; running it afterwards is an error, closing it again not."""
        if not self.closed:
            self.closed = True
            self._close()

    @abstractmethod
    def _close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Runtime(Protocol):
    """What a module in this folder offers that runs graphs from files.

    NAME is what users call it; GRAPHS the runtimes whose targets' graphs it runs, the best first.
    """

    @property
    def NAME(self) -> str: ...  # noqa: N802 - a module's constant

    @property
    def GRAPHS(self) -> tuple[str, ...]: ...  # noqa: N802

    def availability(self) -> Availability:
        """Whether it can work here; loads no model and never raises."""

    def load(
        self, model: Graph, threads: int | None = None, options: LoadOptions = DEFAULTS
    ) -> Session:
        """A session of a graph.

        Args:
            threads: as many cores as this process may use, where it is left out.

        Raises:
            RuntimeUnavailable: it cannot work here, or it would not run the attention itself.
            FileError: it refuses the graph.
        """


def check_inputs(
    specs: Sequence[TensorSpec],
    inputs: Mapping[str, NDArray[np.generic]],
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Raise InputError unless the inputs are those that the model takes."""
    given = {name: (_name(array.dtype), array.shape) for name, array in inputs.items()}
    check_sizes(specs, given, ranges)


def check_sizes(
    specs: Sequence[TensorSpec],
    inputs: Mapping[str, tuple[str, tuple[int, ...]]],
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """The same on dtype and shape alone, for tensors that lie on a device."""
    known = {spec.name for spec in specs}
    names = ", ".join(spec.name for spec in specs)
    for name in inputs:
        if name not in known:
            raise InputError(f"the model has no input '{name}'", f"its inputs are {names}")
    sizes: dict[str, tuple[int, str]] = {}
    for spec in specs:
        if spec.name not in inputs:
            raise InputError(f"input '{spec.name}' is missing", f"give all of {names}")
        _check_input(spec, *inputs[spec.name], sizes)
    for size, (low, high) in (ranges or {}).items():
        if size in sizes and not low <= sizes[size][0] <= high:
            found, where = sizes[size]
            raise InputError(
                f"'{size}' is {found} in input '{where}', the model takes {low} to {high}",
                "split the request, or export with a wider --dynamic range",
            )


def _check_input(
    spec: TensorSpec, dtype: str, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]
) -> None:
    if dtype != spec.dtype:
        raise InputError(
            f"input '{spec.name}' is {dtype}, the model takes {spec.dtype}", "convert it first"
        )
    if len(shape) != len(spec.shape):
        raise InputError(
            f"input '{spec.name}' has shape {shape}, the model takes {_told(spec)}",
            f"give it {len(spec.shape)} axes",
        )
    for axis, (size, expected) in enumerate(zip(shape, spec.shape, strict=True)):
        if isinstance(expected, str):
            seen, where = sizes.setdefault(expected, (size, spec.name))
            if size != seen:
                raise InputError(
                    f"'{expected}' is {seen} in input '{where}' and {size} in '{spec.name}'",
                    "give both the same size",
                )
        elif size != expected:
            raise InputError(
                f"input '{spec.name}' has {size} on axis {axis}, the model takes {_told(spec)}",
                f"give it {expected} there, or export that axis as dynamic",
            )


@cache  # numpy takes longer for it than for all else that is checked
def _name(dtype: np.dtype[Any]) -> str:
    """Bytes in the other order are another dtype: runtimes read them as if they were in theirs."""
    return dtype.name if dtype.isnative else dtype.str


def _told(spec: TensorSpec) -> str:
    return "(" + ", ".join(map(str, spec.shape)) + ")"
