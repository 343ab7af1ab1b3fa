"""openvino: OpenVINO on the CPU, in float32."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import FileError, RuntimeUnavailable, one_line
from attn_export.protos import with_weights
from attn_export.runtimes.base import (
    DEFAULTS,
    Arrays,
    Availability,
    Graph,
    GraphBytes,
    LoadOptions,
    Session,
    TensorSpec,
)
from attn_export.runtimes.packages import version
from attn_export.runtimes.threads import cores

NAME = "openvino"
GRAPHS = (NAME,)
DEVICE = "CPU"
DTYPES = {"boolean": "bool", "f16": "float16", "f32": "float32", "f64": "float64"}
DTYPES |= {f"{kind}{bits}": f"{name}int{bits}" for kind, name in (("i", ""), ("u", "u"))
           for bits in (8, 16, 32, 64)}  # fmt: skip


def availability() -> Availability:
    """Whether the package is installed and imports."""
    number = version("openvino")
    if number is None:
        return Availability(
            NAME, False, "openvino is not installed", "run `pip install 'attn-export[openvino]'`"
        )
    try:
        _import()
    except RuntimeUnavailable as error:
        return Availability(NAME, False, error.observed, error.way_out)
    return Availability(NAME, True, versions={"openvino": number}, device=DEVICE)


def _import() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise RuntimeUnavailable(
            f"openvino does not import ({one_line(error)})",
            "run `pip install 'attn-export[openvino]'`",
        ) from error
    return openvino


class OpenVinoSession(Session):
    """A model compiled for the CPU; computed in float32, where OpenVINO may choose bfloat16."""

    def __init__(self, model: Graph, threads: int) -> None:
        """Load a model from a path (external data beside it) or serialized.

        Raises:
            RuntimeUnavailable: openvino is not installed.
            FileError: OpenVINO refuses the model.
        """
        core = _import().Core()
        config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        if isinstance(model, GraphBytes):  # a buffer has no folder where weights could be found
            source: bytes | str = with_weights(model.data, model.folder)
        else:
            source = model if isinstance(model, bytes) else str(model)
        try:
            self._compiled = core.compile_model(core.read_model(source), DEVICE, config)
        except RuntimeError as error:
            name = "the model" if isinstance(model, bytes) else model.name
            raise FileError(
                f"OpenVINO refuses {name} ({one_line(error)})",
                "export it again, or with another --lowering",
            ) from error
        self._requests = threading.local()  # a request that one thread runs refuses all others
        self._outputs = [output.get_any_name() for output in self._compiled.outputs]
        super().__init__(NAME, [_spec(port) for port in self._compiled.inputs])

    def _run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        try:
            values = self._request().infer(dict(inputs))
        except RuntimeError as error:
            raise FileError(
                f"OpenVINO failed on the model ({one_line(error)})",
                "export it again, or with another --lowering",
            ) from error
        return {name: np.array(values[index]) for index, name in enumerate(self._outputs)}

    def _request(self) -> Any:
        if not hasattr(self._requests, "own"):
            self._requests.own = self._compiled.create_infer_request()
        return self._requests.own

    def placement(self) -> dict[str, int]:
        return {DEVICE: len(self._compiled.get_runtime_model().get_ops())}

    def _close(self) -> None:
        self._compiled = None
        self._requests = threading.local()


def _spec(port: Any) -> TensorSpec:
    kind = port.get_element_type().get_type_name()
    if kind not in DTYPES:
        raise FileError(
            f"input '{port.get_any_name()}' is a {kind}, which numpy does not have",
            "export the model with inputs of another dtype",
        )
    name = str(port.get_any_name())
    sizes = tuple(
        f"?{name}{axis}" if size.is_dynamic else int(size.get_length())
        for axis, size in enumerate(port.get_partial_shape())
    )
    return TensorSpec(name, DTYPES[kind], sizes)


def load(
    model: Graph, threads: int | None = None, options: LoadOptions = DEFAULTS
) -> OpenVinoSession:
    """As `Runtime.load`."""
    found = availability()
    found.require()
    return OpenVinoSession(model, threads or cores())
