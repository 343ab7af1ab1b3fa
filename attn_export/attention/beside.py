"""Lower rotary embedding and linear attention, which are no sites and have ops of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from attn_export.attention.apply import apply
from attn_export.attention.linear import CHUNKS, Recurrence, recurrences
from attn_export.attention.lower import linear_attention, rotary_embedding
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.rotary import Rotation, rotations
from attn_export.attention.scans import scan_recurrence
from attn_export.attention.site import Beside
from attn_export.capability import (
    CONTRIB_ROTARY,
    FOLDS_ROTARY,
    GROUP_QUERY_ATTENTION,
    KERNELS,
    LINEAR_ATTENTION,
    STANDARD_ROTARY,
    Form,
    why_not,
)

Sizes = Sequence[Mapping[str, int]]
ROTATION = "attn_export.rotation"
"""Metadata of a RotaryEmbedding: the name of the node that ended the rotation."""
NOT_CAUSAL = NotLowerable(
    Reason.NOT_EXPRESSIBLE,
    "no sum over earlier tokens alone is seen in it, which is what LinearAttention computes",
)
CHUNKS_ARE_FAST = NotLowerable(
    Reason.SLOWER,
    "it is computed in chunks, which was measured to be about as fast as LinearAttention;"
    " --lowering contrib takes that",
)


def lower_rotary(
    model: ir.Model,
    runtime: str,
    version: str,
    sizes: Sizes,
    choice: str,
    dtype: str | None = None,
) -> tuple[Beside, ...]:
    """Each rotary embedding of the main graph becomes one node where the runtime has the op.

    On a CPU with ONNX Runtime 1.31.1 the node took half to two thirds of the plain form's time at
    64 to 1,024 tokens (best of 60 runs), so that nothing is left plain for speed's sake.
    """
    done = [_as_given(node) for node in model.graph if node.op_type == "RotaryEmbedding"]
    proved: set[tuple[object, ...]] = set()
    for rotation in rotations(model):
        name = _name(rotation.output)
        reasons: list[NotLowerable] = []
        for op in _rotary_ops(model, runtime, choice, rotation):
            signature = _rotary_signature(op, rotation)
            try:
                _check(op, runtime, version, model, rotation.x, dtype)
                rewrite = rotary_embedding.build(rotation, op)
                for node in rewrite.nodes:
                    node.metadata_props[ROTATION] = name
                apply(model, rewrite, sizes, brief=signature in proved)
            except NotLowerable as reason:
                reasons.append(reason)
                continue
            proved.add(signature)
            done.append(Beside(name, op, tuple(reasons)))
            break
        else:
            done.append(Beside(name, None, tuple(reasons)))
    return tuple(done)


def with_folded(model: ir.Model, rotary: Sequence[Beside], runtime: str) -> tuple[Beside, ...]:
    """What became of rotations whose nodes are gone: GroupQueryAttention turns them itself."""
    if runtime not in FOLDS_ROTARY:
        return tuple(rotary)
    left = {
        node.metadata_props.get(ROTATION, str(node.name))
        for node in model.graph
        if node.op_type == "RotaryEmbedding"
    }
    return tuple(
        replace(found, lowering=GROUP_QUERY_ATTENTION)
        if found.lowering == CONTRIB_ROTARY and found.name not in left
        else found
        for found in rotary
    )


def _as_given(node: ir.Node) -> Beside:
    """A node that the exporter, or the file, has already."""
    return Beside(str(node.name), f"{node.domain or 'ai.onnx'}.{node.op_type}")


def _rotary_ops(model: ir.Model, runtime: str, choice: str, rotation: Rotation) -> tuple[str, ...]:
    """A table for each row lies as the standard op takes it, one table for all as the other."""
    shared = rotary_embedding.shares_rows(rotation)
    ops = (CONTRIB_ROTARY, STANDARD_ROTARY) if shared else (STANDARD_ROTARY, CONTRIB_ROTARY)
    kernels = {kernel.op for kernel in KERNELS if kernel.runtime == runtime}
    if model.opset_imports.get("", 0) < 23:
        kernels.discard(STANDARD_ROTARY)
    allowed = {"auto": ops, "contrib": (CONTRIB_ROTARY,), "standard": (STANDARD_ROTARY,)}
    return tuple(op for op in allowed.get(choice, ()) if op in kernels)


def _rotary_signature(op: str, rotation: Rotation) -> tuple[object, ...]:
    tables = [(str(t.value.shape), t.axes, t.indices) for t in (rotation.cos, rotation.sin)]
    x = rotation.x
    return op, str(x.shape), x.dtype, rotation.size, rotation.interleaved, *tables


def lower_linear(
    model: ir.Model,
    runtime: str,
    version: str,
    sizes: Sizes,
    choice: str,
    counted: Sequence[str],
    dtype: str | None = None,
) -> tuple[Beside, ...]:
    """Each causal linear attention of the main graph becomes one LinearAttention node.

    Args:
        counted: names of the nodes that the counter takes for linear attention.

    Returns:
        One for each that was counted or found.
    """
    found: dict[str, Recurrence] = {r.name: r for r in recurrences(model)}
    done: dict[str, Beside] = {}
    for node in list(model.graph):
        try:
            recurrence = found.get(str(node.name)) or scan_recurrence(model, node)
            if recurrence is None:
                continue
            _lower_recurrence(model, recurrence, runtime, version, sizes, choice, dtype)
        except NotLowerable as reason:
            done[str(node.name)] = Beside(str(node.name), None, (reason,))
        else:
            done[str(node.name)] = Beside(str(node.name), LINEAR_ATTENTION, ())
    sums = {name for name, recurrence in found.items() if recurrence.value is None}
    for name in counted:
        done.setdefault(name, Beside(name, None, (NOT_CAUSAL,)))
    return tuple(entry for name, entry in done.items() if name not in sums)


def _lower_recurrence(
    model: ir.Model,
    found: Recurrence,
    runtime: str,
    version: str,
    sizes: Sizes,
    choice: str,
    dtype: str | None,
) -> None:
    if choice in ("standard", "decomposed"):
        raise NotLowerable(Reason.NO_KERNEL, f"--lowering {choice} has no op for it")
    _check(LINEAR_ATTENTION, runtime, version, model, found.query.value, dtype)
    if found.form == CHUNKS and choice == "auto":
        raise CHUNKS_ARE_FAST
    apply(model, linear_attention.build(found), sizes)


def _check(
    op: str, runtime: str, version: str, model: ir.Model, value: ir.Value, dtype: str | None
) -> None:
    """Raise NotLowerable where the runtime has no kernel of the op for `dtype`, or the value's."""
    if value.dtype is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "its dtype is unknown")
    form = Form(dtype=dtype or value.dtype.numpy().name, opset=model.opset_imports.get("", 23))
    refusal = why_not(op, runtime, version, form)
    if refusal is not None:
        raise NotLowerable(Reason(refusal.code), str(refusal))


def _name(value: ir.Value) -> str:
    node = value.producer()
    return str(node.name if node is not None else value.name)
