"""torch-compile: the module compiled by `torch.compile`, on the CPU."""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import RuntimeUnavailable, one_line
from attn_export.runtimes import torch_eager
from attn_export.runtimes.base import Arrays, Availability, TensorSpec
from attn_export.runtimes.torch_eager import TorchSession

if TYPE_CHECKING:
    from torch import nn

NAME = "torch-compile"


def availability() -> Availability:
    """Whether torch is here, and what it compiles with: a C++ compiler and Python's headers."""
    torch = torch_eager.availability()
    if not torch.ok:
        return Availability(NAME, False, torch.observed, torch.fix)
    compiler = os.environ.get("CXX") or "g++"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    observed, fix = "", ""
    if shutil.which(compiler) is None:
        observed = f"torch.compile needs a C++ compiler, and '{compiler}' was not found"
        fix = "install g++, or name another one in CXX"
    elif not headers.is_file():
        observed = f"torch.compile needs Python's headers, and {headers} was not found"
        fix = "install python3-dev, or Python's development package of your system"
    return Availability(NAME, not observed, observed, fix, torch.versions, device="CPU")


class CompiledSession(TorchSession):
    """The compiled module; each new set of sizes may compile again."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
        names: Mapping[str, str] | None = None,
    ) -> None:
        import torch

        super().__init__(module, inputs, outputs, names, NAME)
        with warnings.catch_warnings():  # PyTorch uses what it deprecates when it starts
            warnings.simplefilter("ignore", DeprecationWarning)
            self._call = torch.compile(module)

    def _run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return super()._run(inputs)
        except TorchDynamoException as error:
            raise RuntimeUnavailable(
                f"torch.compile does not compile the model ({one_line(error)})",
                "leave torch-compile out",
            ) from error
