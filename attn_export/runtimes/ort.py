"""ONNX Runtime sessions: what its execution providers have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import FileError, RuntimeUnavailable, one_line
from attn_export.runtimes.base import (
    DEFAULTS,
    Arrays,
    Graph,
    GraphBytes,
    LoadOptions,
    Placed,
    Session,
    TensorSpec,
)
from attn_export.runtimes.libraries import why_not_loaded
from attn_export.runtimes.packages import onnxruntime_owner
from attn_export.runtimes.placement import counts, misplaced, told

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    "tensor(int8)": "int8",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(uint8)": "uint8",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
}


def import_onnxruntime() -> Any:
    """The onnxruntime module, once it is known that exactly one package owns it.

    From 1.29 on it reports what it loads to its makers, from a thread that starts with the import
    and for which a forked child waits for ever when it exits. That is off unless the environment
    says otherwise.

    Raises:
        RuntimeUnavailable: no package, two packages, or one that does not import.
    """
    owner, number = onnxruntime_owner()
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeUnavailable(
            f"{owner} {number} does not import ({one_line(error)})",
            f"run `pip install --force-reinstall {owner}=={number}`",
        ) from error
    return onnxruntime


@dataclass(frozen=True)
class Provider:
    """An execution provider, and the options that it is made with.

    Attributes:
        devices: that a plugin listed; none for a provider that is part of ONNX Runtime.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[Any, ...] = ()


CPU = Provider("CPUExecutionProvider")
CUDA = "CUDAExecutionProvider"


@dataclass(frozen=True)
class Settings:
    """What ONNX Runtime does with threads and memory on the CPU; docs/production.md has figures.

    Attributes:
        spinning: idle threads of the pool look for work for a while before they sleep.
        arena: freed memory is kept for later runs.
        patterns: the memory plan of each shape that was seen is kept.
    """

    spinning: bool = True
    arena: bool = True
    patterns: bool = True


class OrtSession(Session):
    """An `onnxruntime.InferenceSession` whose providers were checked against the request."""

    def __init__(
        self,
        runtime: str,
        model: Graph,
        providers: Sequence[Provider],
        threads: int,
        asked: LoadOptions = DEFAULTS,
        *,
        optimize: bool = True,
        ranges: Mapping[str, tuple[int, int]] | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Load a model from a path (external data beside it) or serialized.

        Args:
            providers: the first is the one that is asked for, the others take what it leaves.
            ranges: symbolic size -> its bounds; requests outside of them are refused.
            settings: instead of what `asked` says of the pool, for measurements.

        Raises:
            RuntimeUnavailable: ONNX Runtime did not take the first provider asked for, or gave
                attention to another one, without `allow_fallback`.
            FileError: ONNX Runtime refuses the model.
        """
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors are raised, and told in one sentence
        settings = settings or Settings(spinning=asked.spinning is not False)
        spinning = "1" if settings.spinning else "0"
        options.add_session_config_entry("session.intra_op.allow_spinning", spinning)
        options.enable_cpu_mem_arena = settings.arena
        options.enable_mem_pattern = settings.patterns
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if asked.trace:
            options.enable_profiling = True
            options.profile_file_prefix = str(asked.trace / "profile")
            options.log_severity_level = 0
        self._traced = asked.trace is not None
        level = asked.level if optimize else "off"
        if level:
            name = "DISABLE_ALL" if level == "off" else f"ENABLE_{level.upper()}"
            options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{name}")
        self._without = list(asked.without)
        self._open(model, options, providers)
        first = providers[0].name
        number = int(providers[0].options.get("device_id", 0))
        self._memory = ("cuda", number) if first == CUDA else ("cpu", 0)
        if self._session.get_providers()[0] != first:
            raise RuntimeUnavailable(
                f"{first} was asked for and ONNX Runtime runs on"
                f" {self._session.get_providers()[0]}{why_not_loaded(first)}",
                "reinstall the package that the provider or its library came with",
            )
        elsewhere = misplaced(self.nodes(), first)
        if elsewhere and not asked.allow_fallback:
            raise RuntimeUnavailable(
                told(elsewhere, first), "allow that with --allow-fallback, or export it again"
            )
        inputs = [_spec(argument) for argument in self._session.get_inputs()]
        super().__init__(runtime, inputs, ranges)
        self.fallback = told(elsewhere, first) if elsewhere else ""

    def _open(self, model: Graph, options: Any, providers: Sequence[Provider]) -> None:
        ort = import_onnxruntime()
        plugins = [p for p in providers if p.devices]
        built_in = [p for p in providers if not p.devices]
        # The providers first: onnxruntime replaces a missing one by the CPU with a mere warning.
        missing = [p.name for p in built_in if p.name not in ort.get_available_providers()]
        if missing:
            raise RuntimeUnavailable(
                f"{missing[0]} is not part of the installed onnxruntime {ort.__version__}",
                "install the package that has it, or ask for another runtime",
            )
        if self._traced:
            ort.set_default_logger_severity(0)
        elif providers[0] != CPU:  # a provider that does not load is told in one sentence
            ort.set_default_logger_severity(4)
        for plugin in plugins:  # next to a list of providers they would be left out
            options.add_provider_for_devices(list(plugin.devices), dict(plugin.options))
        given = None if plugins else [(p.name, dict(p.options)) for p in built_in]
        if isinstance(model, GraphBytes):
            options.add_session_config_entry(WEIGHTS_FOLDER, str(model.folder.absolute()))
            source: bytes | str = model.data
        else:
            source = model if isinstance(model, bytes) else str(model)
        try:
            self._session = ort.InferenceSession(
                source, options, providers=given, enable_fallback=0,
                disabled_optimizers=self._without or None,
            )  # fmt: skip
        except Exception as error:  # onnxruntime's own exceptions share no base class
            name = "the model" if isinstance(model, bytes) else model.name
            raise FileError(
                f"ONNX Runtime {ort.__version__} refuses {name} ({one_line(error)})",
                "export it again, or with another --lowering",
            ) from error
        self.outputs = [output.name for output in self._session.get_outputs()]

    def _run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        try:
            values = self._session.run(self.outputs, dict(inputs))
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise FileError(
                f"ONNX Runtime failed on the model ({one_line(error)})",
                "export it again, or with another --lowering",
            ) from error
        return dict(zip(self.outputs, values, strict=True))

    @property
    def memory(self) -> tuple[str, int]:
        """Device and its number, as onnxruntime's OrtValue has them, for values that stay there."""
        return self._memory

    @property
    def inference_session(self) -> Any:
        """The `onnxruntime.InferenceSession` itself.

        Raises:
            UsageError: the session is closed.
        """
        self.require_open()
        return self._session

    def placement(self) -> dict[str, int]:
        return counts(self.nodes())

    def nodes(self) -> list[Placed]:
        return [
            Placed(part.ep_name, node.domain, node.op_type, node.name)
            for part in self._session.get_provider_graph_assignment_info()
            for node in part.get_nodes()
        ]

    def _close(self) -> None:
        if self._traced:
            self._session.end_profiling()
            import_onnxruntime().set_default_logger_severity(2)  # as ONNX Runtime starts with
        self._session = None


def _spec(argument: Any) -> TensorSpec:
    shape = tuple(
        size if isinstance(size, int) or size not in (None, "", "?") else f"?{argument.name}.{axis}"
        for axis, size in enumerate(argument.shape)
    )
    return TensorSpec(argument.name, dtype_of(argument.type, argument.name), shape)


def dtype_of(kind: str, name: str = "") -> str:
    """`tensor(float)` -> `float32`.

    Raises:
        FileError: numpy has no such type.
    """
    if kind not in DTYPES:
        raise FileError(
            f"tensor '{name}' is a {kind}, which numpy does not have",
            "export the model with inputs and outputs of another dtype",
        )
    return DTYPES[kind]
