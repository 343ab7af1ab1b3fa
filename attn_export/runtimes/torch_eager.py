"""torch: the module itself, run eagerly on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn_export.runtimes.base import Arrays, Availability, Session, TensorSpec
from attn_export.runtimes.packages import version

if TYPE_CHECKING:
    from torch import nn

NAME = "torch"


def availability() -> Availability:
    number = version("torch")
    if number is None:
        return Availability(
            NAME, False, "torch is not installed", "run `pip install 'attn-export[export]'`"
        )
    return Availability(NAME, True, versions={"torch": number}, device="CPU")


class TorchSession(Session):
    """A module in eval mode that takes its inputs by name, under `torch.inference_mode`."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
        names: Mapping[str, str] | None = None,
        runtime: str = NAME,
    ) -> None:
        """`names` is parameter -> input name, for those that differ.

        The module is put into eval mode, and back into its own when the session is closed.
        """
        super().__init__(runtime, inputs)
        self._parameters = {name: parameter for parameter, name in (names or {}).items()}
        self._call: Callable[..., Any] | None = module
        self._modes = {child: child.training for child in module.modules()}
        module.eval()
        self._outputs = tuple(outputs)

    def _run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        import torch

        from attn_export.outputs import named_tensors

        assert self._call is not None
        tensors = {self._parameters.get(name, name): torch.tensor(a) for name, a in inputs.items()}
        with torch.inference_mode():
            values = [value.numpy() for _, value in named_tensors(self._call(**tensors))]
        return dict(zip(self._outputs, values, strict=True))

    def placement(self) -> dict[str, int]:
        return {"CPU": 1}

    def _close(self) -> None:
        for child, training in self._modes.items():
            child.training = training
        self._modes = {}
        self._call = None
