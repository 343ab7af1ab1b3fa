"""The module itself, run eagerly as the exported graph is meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attn_export.errors import ExportError, one_line
from attn_export.models.spec import ExportSpec
from attn_export.outputs import named_tensors
from attn_export.parity.tolerance import Array
from attn_export.signature import NO_BFLOAT16


@contextmanager
def fast_path(*, enabled: bool) -> Iterator[None]:
    """Let nn.MultiheadAttention and nn.TransformerEncoder take their inference path, or not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled and before)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def run(
    spec: ExportSpec, module: nn.Module, inputs: Mapping[str, Tensor], *, fast: bool = False
) -> dict[str, Array]:
    """One eager run; outputs by name.

    Without PyTorch's fast path, unless `fast`: it is no part of the exported graph, and on padded
    positions it gives zeros instead of the layers' answers.

    Raises:
        ExportError: the model raises.
    """
    try:
        with torch.inference_mode(), fast_path(enabled=fast):
            tensors = [tensor for _, tensor in named_tensors(module(**inputs))]
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
        raise ExportError(
            f"the model raised {type(error).__name__} on {shapes}: {one_line(error)}",
            "declare only the sizes that it takes",
        ) from error
    for name, tensor in zip(spec.outputs, tensors, strict=True):
        if tensor.dtype is torch.bfloat16:
            raise ExportError(f"output '{name}' is bfloat16", NO_BFLOAT16)
    return {
        name: tensor.detach().numpy() for name, tensor in zip(spec.outputs, tensors, strict=True)
    }


def run_arrays(spec: ExportSpec, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """One eager run on arrays, by the names of the graph's inputs. Errors are those of `run`."""
    tensors = {spec.parameter(name): torch.tensor(array) for name, array in inputs.items()}
    return run(spec, spec.module, tensors)
