"""Example inputs that are no tensors: flags are fixed, caches become an input for each tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from attn_export.models.parameters import with_parameters
from attn_export.outputs import is_layered

FLAGS = (bool, str)


def tensors_only(
    module: nn.Module, values: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any], dict[str, str]]:
    """A module that takes tensors alone, its inputs, and the graph's names of those of caches.

    A cache of keys and values (B, K, P, H), as the transformers package has them, gives the inputs
    `past_key_values.N.key` and `past_key_values.N.value` for each layer that holds any. The module
    is as it was, where there is neither a flag nor a cache; values of other types are left as they
    are.
    """
    flags = {name: value for name, value in values.items() if isinstance(value, FLAGS)}
    caches = {name: value for name, value in values.items() if is_layered(value)}
    if len(caches) > 1:  # their names would be the same
        caches = {}
    if not flags and not caches:
        return module, dict(values), {}
    inputs = {n: value for n, value in values.items() if n not in flags and n not in caches}
    names = {}
    for cache in caches.values():
        for index, part, tensor in _parts(cache):
            parameter = f"past_key_values_{index}_{part}"
            inputs[parameter], names[parameter] = tensor, f"past_key_values.{index}.{part}"
    return _with_parameters(inputs)(module, flags, caches), inputs, names


class TensorsOnly(nn.Module):
    """`model` with its flags fixed, and its caches made anew from the tensors of each call."""

    def __init__(
        self, model: nn.Module, flags: Mapping[str, Any], caches: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.model, self.flags, self.caches = model, dict(flags), dict(caches)
        self.training = model.training

    def forward(self, **tensors: Tensor) -> Any:
        caches = {}
        for name, example in self.caches.items():
            caches[name] = cache = copy.copy(example)
            cache.layers = [copy.copy(layer) for layer in example.layers]
            for index, part, _ in _parts(example):
                given = tensors.pop(f"past_key_values_{index}_{part}")
                setattr(cache.layers[index], f"{part}s", given)
        return self.model(**tensors, **self.flags, **caches)


def _with_parameters(names: Iterable[str]) -> type[TensorsOnly]:
    """TensorsOnly with a parameter for each input."""

    class Named(TensorsOnly):
        @with_parameters(names)
        def forward(self, **tensors: Tensor) -> Any:
            return super().forward(**tensors)

    return Named


def _parts(cache: Any) -> list[tuple[int, str, Tensor]]:
    """(layer, "key" or "value", tensor) of each layer that holds any."""
    return [
        (index, part, tensor)
        for index, layer in enumerate(cache.layers)
        for part, tensor in (("key", layer.keys), ("value", layer.values))
        if isinstance(tensor, Tensor)
    ]
