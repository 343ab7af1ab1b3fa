"""What a model returned -> named tensors, caches of keys and values among them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_export.errors import ExportError

PLAIN = (type(None), bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool)


def named_tensors(result: Any) -> list[tuple[str, Tensor]]:
    """Name and value of each tensor that `forward` returned, in its order.

    A tensor is named by its path: `logits`, `output_0`. A cache, as the transformers package has
    them, gives `present.N.key` and `present.N.value` (B, K, P, H) for each layer that holds any;
    that of an encoder-decoder `present.N.decoder.key` and `present.N.encoder.key`. Numbers and None
    are left out.

    Raises:
        ExportError: a value of another type.
    """
    found: list[tuple[str, Tensor]] = []
    leaves, _ = pytree.tree_flatten_with_path(result, is_leaf=_is_cache)
    for path, leaf in leaves:
        name = _name(path)
        if isinstance(leaf, Tensor):
            found.append((name, leaf))
        elif _is_cache(leaf):
            found += _cached(leaf)
        elif not isinstance(leaf, PLAIN):
            raise ExportError(
                f"the model returns a {type(leaf).__name__} as {name}",
                "return tensors, or pass use_cache=False where it is a cache",
            )
    return found


def _name(path: Sequence[Any]) -> str:
    keys = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    text = "_".join(keys) or "output"
    return f"output_{text}" if text[0].isdigit() else re.sub(r"\W+", "_", text)


def _is_cache(value: Any) -> bool:
    return hasattr(value, "self_attention_cache") or is_layered(value)


def is_layered(value: Any) -> bool:
    """Whether a value is one cache, with keys and values in each of its layers."""
    layers = getattr(value, "layers", None)
    if isinstance(value, nn.Module) or not isinstance(layers, list) or not layers:
        return False
    return all(hasattr(layer, "keys") and hasattr(layer, "values") for layer in layers)


def _cached(cache: Any) -> Iterator[tuple[str, Tensor]]:
    if hasattr(cache, "self_attention_cache"):
        parts = {".decoder": cache.self_attention_cache, ".encoder": cache.cross_attention_cache}
    else:
        parts = {"": cache}
    for part, layered in parts.items():
        for index, layer in enumerate(layered.layers):
            if isinstance(layer.keys, Tensor) and isinstance(layer.values, Tensor):
                yield f"present.{index}{part}.key", layer.keys
                yield f"present.{index}{part}.value", layer.values
