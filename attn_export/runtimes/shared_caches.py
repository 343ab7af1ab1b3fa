"""Caches in buffers that past and present share, on an ONNX Runtime session. Needs numpy alone.

ONNX Runtime copies a cache unless the output is bound to the very memory of the input (I/O
binding); GroupQueryAttention compares their addresses. Keys and values must both share: with one of
them alone its CPU kernel copies both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attn_export.errors import FileError, InputError, UsageError, one_line
from attn_export.fixed_caches import FixedCaches
from attn_export.parity.tolerance import Array
from attn_export.precision.stored import AsStored
from attn_export.runtimes.base import Arrays, Session
from attn_export.runtimes.ort import OrtSession, import_onnxruntime

HOST = "cpu"


def shares(session: Session) -> bool:
    """Whether a session can continue buffers in place."""
    return isinstance(_inner(session), OrtSession)


def _inner(session: Session) -> Session:
    return session.session if isinstance(session, AsStored) else session


class SharedCaches:
    """The buffers of some rows, and the session that continues them. For one thread.

    Attributes:
        length: positions that are filled.
        capacity: positions that there are.
    """

    def __init__(self, session: Session, caches: FixedCaches, rows: int, capacity: int) -> None:
        """Raises UsageError where the session is not ONNX Runtime's."""
        inner = _inner(session)
        if not isinstance(inner, OrtSession):
            raise UsageError(
                f"{session.runtime} does not continue caches in place", "call run instead"
            )
        self._ort, self._caches = inner, caches
        self._stored = session if isinstance(session, AsStored) else None
        self._specs = {spec.name: spec for spec in inner.inputs}
        self._others = [name for name in inner.outputs if name not in caches.outputs.values()]
        self.rows, self.length, self.capacity = rows, 0, capacity
        self._bind(self._zeros(capacity))

    def _zeros(self, capacity: int) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for name in self._caches.outputs:
            spec = self._specs[name]
            shape = [self.rows, *spec.shape[1:]]
            shape[self._caches.axis] = capacity
            arrays[name] = np.zeros([int(size) for size in shape], spec.dtype)
        return arrays

    def _bind(self, arrays: Mapping[str, Array]) -> None:
        """Bind each buffer as past and as present."""
        make = import_onnxruntime().OrtValue.ortvalue_from_numpy  # in host memory without a copy
        self._values = {name: make(a, *self._ort.memory) for name, a in arrays.items()}
        self._binding = self._ort.inference_session.io_binding()
        for name, value in self._values.items():
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(self._caches.outputs[name], value)
        self._arrays = arrays

    def _host(self, name: str) -> Array:
        """A buffer in host memory: the very one, or a copy of one on a device."""
        if self._ort.memory[0] == HOST:
            return self._arrays[name]
        array: Array = self._values[name].numpy()
        return array

    def step(self, inputs: Mapping[str, Array]) -> Arrays:
        """The outputs other than caches; these hold the new tokens afterwards.

        Raises:
            InputError: the new tokens do not fit.
            UsageError: the session is closed.
            FileError: the runtime failed. The tokens that were there are as before.
        """
        total = self._caches.room(self.length, inputs)
        if total > self.capacity:
            raise InputError(
                f"{total} tokens do not fit into buffers of {self.capacity}", "let them grow first"
            )
        session = self._ort.inference_session
        given = dict(self._stored.native(inputs) if self._stored else inputs)
        given[self._caches.length] = np.array([self.length], np.int64)
        try:
            for name, array in given.items():
                self._binding.bind_cpu_input(name, np.ascontiguousarray(array))
            for name in self._others:
                self._binding.bind_output(name)  # anew: its shape changes, and the last one is kept
            session.run_with_iobinding(self._binding)
            found = self._binding.get_outputs()[len(self._values) :]
            made = {n: value.numpy() for n, value in zip(self._others, found, strict=True)}
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise FileError(
                f"ONNX Runtime failed on the model ({one_line(error)})",
                "export it again, or with another --lowering",
            ) from error
        self.length = total
        return self._stored.given(made) if self._stored else made

    def fill(self, caches: Mapping[str, Array]) -> None:
        """Take caches (B, K, P, H) over, by their inputs' names, as a prefill gives them."""
        arrays = {name: self._host(name) for name in self._caches.outputs}
        (size,) = {caches[name].shape[self._caches.axis] for name in arrays}
        for name, array in arrays.items():
            self._part(array, size)[...] = caches[name]
        if self._ort.memory[0] != HOST:
            self._bind(arrays)
        self.length = size

    def filled(self) -> Arrays:
        """The caches (B, K, P, H) as far as they are filled, copied, by their outputs' names."""
        found = {
            output: self._part(self._host(name), self.length).copy()
            for name, output in self._caches.outputs.items()
        }
        return self._stored.given(found) if self._stored else found

    def grow(self, capacity: int) -> None:
        """Move to larger buffers; what is filled is copied once."""
        larger = self._zeros(capacity)
        for name, array in larger.items():
            self._part(array, self.length)[...] = self._part(self._host(name), self.length)
        self._bind(larger)
        self.capacity = capacity

    def spoil(self, numbers: Sequence[float]) -> None:
        """Write garbage where nothing is filled, for checks."""
        arrays = {name: self._host(name) for name in self._caches.outputs}
        for array in arrays.values():
            for position in range(self.length, self.capacity):
                index = [slice(None)] * array.ndim
                index[self._caches.axis] = slice(position, position + 1)
                array[tuple(index)] = numbers[position % len(numbers)]
        if self._ort.memory[0] != HOST:
            self._bind(arrays)

    def _part(self, array: Array, size: int) -> Array:
        """The first positions of a buffer."""
        index = [slice(None)] * array.ndim
        index[self._caches.axis] = slice(size)
        return array[tuple(index)]
