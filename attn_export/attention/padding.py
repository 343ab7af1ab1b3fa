"""Masks that are declared right padded: which inputs are, and the length of each row of them."""

from __future__ import annotations

import json
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.site import Account
from attn_export.attention.sizes import sizes
from attn_export.errors import UsageError
from attn_export.right_padded import Promises

DECLARED = "attn_export.right_padded"
"""Metadata of an input: the number that keeps a key. Of a model: all such inputs, as JSON."""
REMOVED = "attn_export.remove_padding"
"""Metadata of an input whose padding is not computed."""


def declare(model: ir.Model, promises: Promises, removed: Collection[str] = ()) -> None:
    """Note on the graph's inputs that they are right padded.

    Args:
        removed: which of them say what padding is not to be computed.

    Raises:
        UsageError: no such input, or one that is no mask (B, T) of integers or truth values; or
            padding that two inputs say.
    """
    known = {str(value.name): value for value in model.graph.inputs}
    for name, keeps in promises.items():
        if name not in known:
            raise UsageError(
                f"the model has no input '{name}' to be right padded",
                f"its inputs are {', '.join(known)}",
            )
        value = known[name]
        rank = -1 if value.shape is None else len(value.shape)
        if rank != 2 or value.dtype is None or value.dtype.is_floating_point():
            raise UsageError(
                f"input '{name}' is {value.dtype} with {rank} axes",
                "declare a mask of integers or truth values (B, T) with --right-padded",
            )
        value.metadata_props[DECLARED] = str(keeps)
        if name in removed:
            value.metadata_props[REMOVED] = "1"
    if len(removed) > 1:
        raise UsageError(
            f"--remove-padding names {len(removed)} inputs, {', '.join(removed)}",
            "name the one mask that says which tokens count",
        )
    if promises:
        model.metadata_props[DECLARED] = json.dumps(dict(promises))


def declared(value: ir.Value) -> int | None:
    """The number that keeps a key in an input that is right padded; None for any other value."""
    keeps = value.metadata_props.get(DECLARED)
    return None if keeps is None else int(keeps)


def removed_padding(model: ir.Model) -> ir.Value | None:
    """The input (B, S) that says which tokens are not to be computed."""
    found = [value for value in model.graph.inputs if REMOVED in value.metadata_props]
    return found[0] if found else None


def masked_by_padding(model: ir.Model) -> dict[str, str]:
    """Outputs (B, S, ...) whose padding is not computed, and the input that says so.

    As `attn_export.parity.rules` writes it: "not:INPUT" where 0 is what keeps a token.
    """
    mask = removed_padding(model)
    if mask is None:
        return {}
    told = str(mask.name) if declared(mask) else f"not:{mask.name}"
    return {str(value.name): told for value in model.graph.outputs if is_per_token(value, mask)}


def is_per_token(value: ir.Value, mask: ir.Value) -> bool:
    """Whether a value is (B, S, ...) as the mask is (B, S)."""
    return value.shape is not None and sizes(value)[:2] == sizes(mask)


def promised(model: ir.Model) -> Promises:
    """What `declare` noted on a model."""
    found = {str(value.name): declared(value) for value in model.graph.inputs}
    return {name: keeps for name, keeps in found.items() if keeps is not None}


def unused_promises(account: Account, promises: Promises) -> list[str]:
    """A note where masks were declared and no site got lengths for it."""
    if not promises or any(outcome.site.mask == "lengths" for outcome in account.outcomes):
        return []
    names = ", ".join(f"'{name}'" for name in promises)
    return [f"no site's mask is made from {names} alone, so that right padding changes nothing"]


def row_lengths(model: ir.Model, mask: ir.Value) -> ir.Value:
    """The number of keys that each row of a declared input keeps, int32 (B,).

    It is computed at the front of the graph, once for all sites; nodes of before are found again.
    """
    name = f"{mask.name}/lengths"
    for node in model.graph:
        if node.name == name:
            return node.outputs[0]
    b = Builder(str(mask.name), {})
    int32 = ir.DataType.INT32
    kept = b.op("Cast", [mask], sizes(mask), int32, to=int(int32))
    if declared(mask) == 0:
        kept = b.op("Sub", [b.constant(np.array(1, np.int32)), kept], sizes(mask), int32)
    axes = b.constant(np.array([1], np.int64))
    lengths = b.op("ReduceSum", [kept, axes], sizes(mask)[:1], int32, keepdims=0)
    b.nodes[-1].name = lengths.name = name
    for weight in b.weights:
        model.graph.register_initializer(weight)
    model.graph.insert_before(model.graph[0], b.nodes)
    return lengths
