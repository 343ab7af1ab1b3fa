"""ort-ep:NAME: a plugin execution provider of ONNX Runtime, from a package `onnxruntime-ep-NAME`.

Such a package offers `get_ep_name()` and `get_library_path()`; its library is registered with ONNX
Runtime, which then lists the devices that it serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from attn_export.errors import RuntimeUnavailable, one_line
from attn_export.runtimes.base import DEFAULTS, Availability, Graph, LoadOptions
from attn_export.runtimes.ort import OrtSession, Provider, import_onnxruntime
from attn_export.runtimes.packages import onnxruntime_owner, version
from attn_export.runtimes.threads import cores

PREFIX = "ort-ep:"
PACKAGE = "onnxruntime-ep-"
SERVES = {"openvino": ("openvino",), "nv-tensorrt-rtx": ("ort-tensorrt",)}
ANY = ("ort-tensorrt", "openvino", "ort-cpu")
"""Graphs of standard ops first, which every provider may take."""


def installed() -> list[str]:
    """Runtimes of the plugin packages that are installed; those that only name others are not."""
    found = {str(part.metadata["Name"]).lower() for part in metadata.distributions()}
    plugins = sorted(name for name in found if name.startswith(PACKAGE))
    return [f"{PREFIX}{n.removeprefix(PACKAGE)}" for n in plugins if find_spec(_module(n))]


def _module(package: str) -> str:
    return package.replace("-", "_")


@dataclass(frozen=True)
class Plugin:
    """The runtime `ort-ep:NAME`; see `Runtime`."""

    NAME: str

    @property
    def package(self) -> str:
        return PACKAGE + self.NAME.removeprefix(PREFIX)

    @property
    def GRAPHS(self) -> tuple[str, ...]:  # noqa: N802 - as in the modules
        name = self.NAME.removeprefix(PREFIX)
        return next((g for start, g in SERVES.items() if name.startswith(start)), ANY)

    def availability(self) -> Availability:
        """Registers the plugin's library, since that tells which devices it serves."""
        try:
            owner, number = onnxruntime_owner()
            _, devices = self._registered()
        except RuntimeUnavailable as error:
            return Availability(self.NAME, False, error.observed, error.way_out)
        versions = {owner: number, self.package: version(self.package) or "?"}
        names = ", ".join(dict.fromkeys(_describe(device) for device in devices))
        return Availability(self.NAME, True, versions=versions, device=names)

    def load(
        self, model: Graph, threads: int | None = None, options: LoadOptions = DEFAULTS
    ) -> OrtSession:
        """As `Runtime.load`."""
        self.availability().require()
        name, devices = self._registered()
        chosen = Provider(name, options.provider, tuple(devices))
        return OrtSession(self.NAME, model, [chosen], threads or cores(), options)

    def _registered(self) -> tuple[str, list[Any]]:
        """The provider's name and its devices.

        Raises:
            RuntimeUnavailable: not installed, it does not register, or it serves no device here.
        """
        if version(self.package) is None or find_spec(_module(self.package)) is None:
            raise RuntimeUnavailable(
                f"{self.package} is not installed", f"run `pip install {self.package}`"
            )
        ort = import_onnxruntime()
        try:
            plugin = import_module(_module(self.package))
            name = str(plugin.get_ep_name())
            if not _devices(ort, name):
                ort.register_execution_provider_library(name, str(plugin.get_library_path()))
        except Exception as error:  # of the plugin, or of ONNX Runtime: no common base class
            raise RuntimeUnavailable(
                f"{self.package} does not register ({one_line(error)})",
                f"run `pip install --upgrade {self.package}`",
            ) from error
        devices = _devices(ort, name)
        if not devices:
            raise RuntimeUnavailable(
                f"{self.package} serves no device of this machine", "leave this runtime out"
            )
        return name, devices


def _devices(ort: Any, name: str) -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == name]


def _describe(device: Any) -> str:
    kind = str(device.device.type).rpartition(".")[2]
    return f"{kind} of {device.device.vendor or 'an unknown vendor'}"
