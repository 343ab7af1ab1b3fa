"""ort-web: onnxruntime-web, which is ONNX Runtime compiled to WebAssembly, under Node.js.

It is what a browser runs with `executionProviders: ["wasm"]`. WebGPU is not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import FileError, RuntimeUnavailable, one_line
from attn_export.protos import with_weights
from attn_export.runtimes import graphs, node
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
from attn_export.runtimes.node_process import NodeProcess, Refused
from attn_export.runtimes.threads import cores

NAME = "ort-web"
GRAPHS = (NAME,)
PACKAGE = "onnxruntime-web"
WORKER = node.FOLDER / "worker.mjs"
DTYPES = (
    "float16", "float32", "float64", "bool", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
LARGEST_FILE = 0x7FE00000
"""Bytes that Chrome takes into one buffer, as ONNX Runtime's documentation says."""
PLACED = re.compile(r"placed on \[(\w+)\]\. Number of nodes: (\d+)")


def availability() -> Availability:
    """Whether Node.js and onnxruntime-web are here."""
    try:
        _, number = node.node()
        _, installed = package()
    except RuntimeUnavailable as error:
        return Availability(NAME, False, error.observed, error.way_out)
    return Availability(NAME, True, versions={"node": number, PACKAGE: installed}, device="CPU")


def package() -> tuple[Path, str]:
    """Folder and version of onnxruntime-web.

    Raises:
        RuntimeUnavailable: it is not installed.
    """
    found = node.package(PACKAGE)
    if found is None:
        raise RuntimeUnavailable(
            f"the npm package {PACKAGE} is not installed", f"run `{node.install_command()}`"
        )
    return found


class WebSession(Session):
    """A model in a Node process of its own."""

    def __init__(self, model: Graph, threads: int) -> None:
        """Load a model from a path (external data beside it) or from serialized bytes.

        Raises:
            RuntimeUnavailable: Node.js or onnxruntime-web is not here, or its process ended.
            FileError: it is no ONNX model, or onnxruntime-web refuses it.
        """
        program, _ = node.node()
        folder, number = package()
        # WebAssembly has no file system in which it would find the weights by their names.
        data = graphs.weight_files(graphs.read(model))
        name, path, tensors = "the model", "", {}
        if isinstance(model, GraphBytes):
            model, data = with_weights(model.data, model.folder), []
        if isinstance(model, bytes):
            tensors = {"model": np.frombuffer(model, np.uint8)}
        else:
            name, path = model.name, str(model)
        self._process = NodeProcess([program, str(WORKER), str(folder)])
        try:
            head, _ = self._process.ask("load", tensors, model=path, data=data, threads=threads)
            self._outputs = head["outputs"]
            super().__init__(NAME, [_spec(**entry) for entry in head["inputs"]])
        except Refused as error:
            self._process.close()
            raise FileError(
                f"{PACKAGE} {number} refuses {name} ({_told(error)})",
                "export it again, or with another --lowering",
            ) from error
        except BaseException:
            self._process.close()
            raise

    @property
    def processes(self) -> tuple[int, ...]:
        return (self._process.pid,)

    def _run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        try:
            _, outputs = self._process.ask("run", inputs)
        except Refused as error:
            raise FileError(
                f"{PACKAGE} failed on the model ({_told(error)})",
                "export it again, or with another --lowering",
            ) from error
        return outputs

    def placement(self) -> dict[str, int]:
        """As ONNX Runtime logs it while the model is loaded once more."""
        log = self._process.logged("describe")
        return {provider: int(nodes) for provider, nodes in PLACED.findall(log)}

    def _close(self) -> None:
        self._process.close()


def _told(error: Refused) -> str:
    """The message, without the code that comes before it."""
    return one_line(Exception(str(error).partition("ERROR_MESSAGE: ")[2] or str(error)))


def _spec(name: str, dtype: str, shape: list[int | str]) -> TensorSpec:
    if dtype not in DTYPES:
        raise FileError(
            f"input '{name}' is a {dtype}, which numpy does not have",
            "export the model with inputs of another dtype",
        )
    sizes = tuple(
        size if isinstance(size, int) or size else f"?{name}.{axis}"
        for axis, size in enumerate(shape)
    )
    return TensorSpec(name, dtype, sizes)


def load(model: Graph, threads: int | None = None, options: LoadOptions = DEFAULTS) -> WebSession:
    """As `Runtime.load`. Every op runs on the one provider that there is, so nothing falls back."""
    availability().require()
    return WebSession(model, threads or cores())
