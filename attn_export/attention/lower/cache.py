"""A cache of keys and values: past ones go in, present ones come out."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site

PAST_KEY, PAST_VALUE = 4, 5
PRESENT_KEY, PRESENT_VALUE = 1, 2


@dataclass(frozen=True)
class Cache:
    """Keys of all tokens so far are (past, new) along the token axis.

    Attributes:
        past_key, past_value: (B, K, P, H) and (B, K, P, Hv).
        key, value: the new tokens', (B, K, S, H) and (B, K, S, Hv).
        present_key, present_value: (B, K, P + S, H) and (B, K, P + S, Hv), as the graph has them.
        aligned: whether the node's own causal flag counts queries from the past's end.
    """

    past_key: ir.Value
    past_value: ir.Value
    key: ir.Value
    value: ir.Value
    present_key: ir.Value | None
    present_value: ir.Value | None
    aligned: bool


def cache_of(site: Site) -> Cache | None:
    """The site's cache: inputs of its node, or keys and values that are joined in front of it.

    Joined ones count where both are results of the graph. Without, they are no cache that anybody
    asked for.

    Raises:
        NotLowerable: one of past keys and past values is missing.
    """
    given = [*site.node.inputs, None, None, None]
    past_key, past_value, key, value = given[PAST_KEY], given[PAST_VALUE], given[1], given[2]
    if key is None or value is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "it lacks an input")
    if (past_key is None) != (past_value is None):
        raise NotLowerable(Reason.CACHE, "it has past keys or past values alone")
    if past_key is not None and past_value is not None:
        outputs = [*site.node.outputs, None, None]
        present_key, present_value = outputs[PRESENT_KEY], outputs[PRESENT_VALUE]
        return Cache(past_key, past_value, key, value, present_key, present_value, True)
    keys, values = _joined(key), _joined(value)
    if keys is None or values is None:
        return None
    return Cache(keys[0], values[0], keys[1], values[1], key, value, False)


def _joined(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """(past, new) of a graph output that joins both along the tokens."""
    node = value.producer()
    if node is None or node.op_type != "Concat" or not value.is_graph_output():
        return None
    if value.shape is None or len(value.shape) != 4 or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    along = node.attributes.get_int("axis", 0) in (2, -2)
    return (past, new) if along and past is not None and new is not None else None
