"""What PyTorch's exporter cannot take as it is, though it has a standard form: one way round each.

Context managers put back what they changed, also after an exception.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from onnxscript import opset18
from torch import Tensor, nn

from attn_export.exporting import sdpa_translation
from attn_export.outputs import named_tensors

Traced = TypeVar("Traced")
Translations = dict[Callable[..., Any], Callable[..., Any]]


def traced(module: nn.Module, trace: Callable[[], Traced]) -> Traced:
    """What `trace` makes of `module`, with those workarounds that it needs.

    Raises:
        Exception: whatever `trace` raised first.
    """
    with own_attributes(module), plain_outputs(module):
        try:
            return trace()
        except Exception as refusal:
            try:
                with symbolic_len():  # not at once: torch.cond cannot be traced with it
                    return trace()
            except Exception:
                raise refusal from None


@contextmanager
def own_attributes(module: nn.Module) -> Iterator[None]:
    """What `forward` assigns to attributes while it is traced is forgotten.

    A detector keeps its grid there, which tracing makes a tensor without data: the module could
    neither be copied nor run any more.
    """
    before = [(child, dict(vars(child))) for child in module.modules()]
    try:
        yield
    finally:
        for child, attributes in before:
            vars(child).clear()
            vars(child).update(attributes)


@contextmanager
def symbolic_len() -> Iterator[None]:
    """`len(tensor)` gives the symbolic size of a dynamic axis.

    Python turns what `__len__` returns into a number, and the axis freezes at the example's size.
    """
    plain = builtins.len

    def length(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt):
            return value.shape[0]
        return plain(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = plain


@contextmanager
def plain_outputs(module: nn.Module) -> Iterator[None]:
    """`forward` returns a tuple of tensors: torch.export knows no caches of keys and values."""
    forward = module.forward
    own = "forward" in vars(module)

    def plain(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(tensor for _, tensor in named_tensors(forward(*args, **kwargs)))

    # torch.export names the inputs after the parameters that inspect.signature reads here.
    # functools.wraps would copy a signature that still has the `self` of an unbound forward.
    vars(plain)["__signature__"] = inspect.signature(forward)
    module.forward = plain
    try:
        yield
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward


def missing() -> Translations:
    """ONNX forms of operators that the exporter has none for, at every opset from 18 on."""
    return {torch.ops.aten._is_all_true.default: _all_true}


def translations() -> Translations:
    """Those, and attention of any number of axes, which takes opset 23."""
    sdpa = torch.ops.aten.scaled_dot_product_attention.default
    return {**missing(), sdpa: sdpa_translation.attention}


def _all_true(x: Any) -> Any:
    """aten::_is_all_true: one bool for the whole tensor. ReduceMin takes no bool at opset 18."""
    op: Any = opset18
    smallest = op.ReduceMin(op.Cast(x, to=ir.DataType.INT32), keepdims=0)
    return op.Cast(smallest, to=ir.DataType.BOOL)
