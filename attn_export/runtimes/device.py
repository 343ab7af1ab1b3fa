"""Run ONNX Runtime on tensors that lie where it computes, so that nothing crosses to the host.

Tensors come and go as DLPack (https://dmlc.github.io/dlpack): PyTorch's, CuPy's, numpy's. A tensor
that another stream still writes, or whose rows are not one after the other, would be read wrongly
(microsoft/onnxruntime #32673), so both are settled before each run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import UsageError, one_line
from attn_export.runtimes.base import Arrays, check_sizes
from attn_export.runtimes.ort import OrtSession, dtype_of, import_onnxruntime

CPU, CUDA = "cpu", "cuda"


class DeviceRun:
    """An OrtSession that takes and gives tensors of a device."""

    def __init__(self, session: OrtSession, device: str = CUDA, index: int = 0) -> None:
        self._session, self._device, self._index = session, device, index

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name, as `onnxruntime.OrtValue`: `torch.from_dlpack(value)` shares its memory.

        Every stream of the device is waited for before and after, whatever stream wrote the inputs.

        Raises:
            UsageError: an input is no tensor of DLPack, missing, unknown, or of another dtype,
                rank or size.
        """
        values = {name: _value(name, tensor) for name, tensor in inputs.items()}
        seen = {n: (dtype_of(v.data_type()), tuple(v.shape())) for n, v in values.items()}
        check_sizes(self._session.inputs, seen, self._session.ranges)
        session = self._session.inference_session
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._session.outputs:
            binding.bind_output(name, self._device, self._index)
        binding.synchronize_inputs()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return dict(zip(self._session.outputs, binding.get_outputs(), strict=True))


class Booleans:
    """A boolean tensor of PyTorch as ONNX Runtime 1.31 takes one: bytes that are said to be bool.

    It does not know DLPack's own type code for bool, which came with DLPack 1.0.
    """

    dtype = np.dtype(np.bool_)

    def __init__(self, tensor: Any) -> None:
        self._bytes = tensor.view(sys.modules["torch"].uint8)

    def __dlpack__(self, **options: Any) -> Any:
        return self._bytes.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._bytes.__dlpack_device__()


def _value(name: str, tensor: Any) -> Any:
    values = import_onnxruntime().OrtValue
    if isinstance(tensor, np.ndarray):
        return values.ortvalue_from_numpy(np.ascontiguousarray(tensor))
    if hasattr(tensor, "contiguous"):
        tensor = tensor.contiguous()
        if str(tensor.dtype) == "torch.bool":
            tensor = Booleans(tensor)
    try:
        return values.from_dlpack(tensor)
    except Exception as error:  # of the tensor's library, or of ONNX Runtime
        raise UsageError(
            f"input '{name}' is no tensor that ONNX Runtime takes ({one_line(error)})",
            "give a contiguous tensor with __dlpack__",
        ) from error


class FixedRun:
    """One set of sizes at fixed addresses, as a CUDA graph needs them.

    Load the model with `LoadOptions(provider={"enable_cuda_graph": "1"})`: the first runs are
    recorded and the later ones replayed, with one launch for the whole model. All nodes must be on
    the CUDA provider, without control flow. Not for several threads: the buffers are shared.
    """

    def __init__(
        self, session: OrtSession, example: Arrays, device: str = CUDA, index: int = 0
    ) -> None:
        """`example` sets the sizes; outputs are as large as those that it gives.

        Raises:
            UsageError: an input is missing, unknown, or of another dtype, rank or size.
        """
        ort = import_onnxruntime()
        self._session = session
        self._inputs = {
            name: ort.OrtValue.ortvalue_from_numpy(np.array(array), device, index)
            for name, array in example.items()
        }
        # Without the graph, which would be recorded for other addresses.
        first = DeviceRun(session, device, index).run(self._inputs)
        self._outputs = {
            name: ort.OrtValue.ortvalue_from_shape_and_type(
                value.shape(), np.dtype(dtype_of(value.data_type())).type, device, index
            )
            for name, value in first.items()
        }
        self._binding = session.inference_session.io_binding()
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs.items():
            self._binding.bind_ortvalue_output(name, value)

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """Outputs by name, copied to the host.

        Raises:
            UsageError: an input is missing, unknown, or of another dtype or size than the example.
        """
        given = {name: (array.dtype.name, array.shape) for name, array in inputs.items()}
        wanted = {n: (dtype_of(v.data_type()), tuple(v.shape())) for n, v in self._inputs.items()}
        if given != wanted:
            raise UsageError(
                f"this run takes {_told(wanted)}, and was given {_told(given)}",
                "give the sizes of its example, or make another one",
            )
        for name, array in inputs.items():
            self._inputs[name].update_inplace(np.ascontiguousarray(array))
        self._binding.synchronize_inputs()
        self._session.inference_session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()
        return {name: np.array(value.numpy()) for name, value in self._outputs.items()}


def _told(sizes: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in sizes.items())
