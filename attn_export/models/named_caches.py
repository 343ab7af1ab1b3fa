"""Caches as named inputs and outputs, which is what exported graphs and their servers need."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from attn_export.models.parameters import with_parameters

Past = Sequence[tuple[Tensor, Tensor]]
"""Keys and values (B, K, P, H) of each layer."""


def past_names(layers: int) -> list[str]:
    """`past_key_values_0_key`, `past_key_values_0_value`, ...: parameters, so without dots."""
    return [f"past_key_values_{i}_{part}" for i in range(layers) for part in ("key", "value")]


def present_names(layers: int) -> list[str]:
    """`present.0.key`, `present.0.value`, ..."""
    return [f"present.{i}.{part}" for i in range(layers) for part in ("key", "value")]


def cache_state(layers: int) -> tuple[tuple[str, str, int], ...]:
    """(output, input, axis) of each cache, as ExportSpec.state wants it; caches grow on axis 2."""
    return tuple(
        (present, past, 2)
        for present, past in zip(present_names(layers), graph_names(layers).values(), strict=True)
    )


def graph_names(layers: int) -> dict[str, str]:
    """Parameter -> `past_key_values.0.key`, as ExportSpec.names wants it."""
    parts = [f"past_key_values.{i}.{part}" for i in range(layers) for part in ("key", "value")]
    return dict(zip(past_names(layers), parts, strict=True))


def named_caches(model: nn.Module, inputs: Sequence[str], layers: int) -> nn.Module:
    """A module with a parameter for each of `inputs` and for each cache.

    `model(*inputs, past=Past | None)` returns a tuple whose last part is the present Past; the
    module returns the same with the caches flattened. With `layers` 0 it is called without a past
    (prefill).
    """
    names = past_names(layers)

    class NamedCaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        @with_parameters([*inputs, *names])  # their number depends on the depth
        def forward(self, **tensors: Tensor) -> tuple[Tensor, ...]:
            flat = [tensors.pop(name) for name in names]
            past = list(zip(flat[::2], flat[1::2], strict=True)) or None
            *outputs, present = self.model(**tensors, past=past)
            return (*outputs, *(tensor for layer in present for tensor in layer))

    return NamedCaches()
