"""Padding of a text batch is not computed, where its user says that it does not count.

Two steps, each taken if the whole graph still computes what counts: token-wise layers run on the
tokens that count alone (`packing`), and everything runs at the longest row's length (`longest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attn_export.attention.padding import declared, removed_padding
from attn_export.attention.site import Work
from attn_export.attention.work.longest import trim, why_not_trimmed
from attn_export.attention.work.packing import pack
from attn_export.attention.work.token_wise import Padded
from attn_export.attention.work.whole import Bindings, differs

PACKED, TRIMMED = "padding", "padding-of-all-rows"
TRIM_SAVES = "every operator, for the longest row's length"


@dataclass(frozen=True)
class Removal:
    """What became of the padding of one mask.

    Attributes:
        before: the canonical graph with all of its padding.
        trims: whether the graph is to be cut at the longest row, once it is lowered.
    """

    work: tuple[Work, ...] = ()
    before: ir.Model | None = None
    trims: bool = False

    def finish(self, model: ir.Model, bindings: Bindings) -> str:
        """Cut the lowered graph at the longest row, name its values anew, and run the whole of it.

        A value with padding removed is not what the same value of the exported program is.

        Returns how it differs from the graph with padding; empty where it does not.
        """
        mask = removed_padding(model)
        if mask is None or self.before is None or not any(work.applied for work in self.work):
            return ""
        if self.trims:
            trim(model, _padded(mask))
        kept = {str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)}
        for node in model.graph:
            for value in node.outputs:
                if value.name and value.name not in kept:
                    value.name = f"{value.name}/unpadded"
        return differs(self.before, model, _padded_of(self.before), bindings, evaluated=False)


def remove_padding(model: ir.Model, bindings: Bindings, left: str = "") -> Removal:
    """Pack the main graph of a canonical model, in place, once that is proved.

    Args:
        bindings: the sizes, as `prove` takes them.
        left: why nothing is to be rewritten; empty where it is.
    """
    mask = removed_padding(model)
    if mask is None:
        return Removal()
    before, padded, name = model.clone(), _padded(mask), str(mask.name)
    packed = before.clone()
    saves = pack(packed, _padded_of(packed))
    against = {
        PACKED: left or ("" if saves else "no product computes tokens (B, S, D) by themselves"),
        TRIMMED: left or why_not_trimmed(model.graph, padded),
    }
    wanted = [step for step, reason in against.items() if not reason]
    taken: list[str] = []
    # Both at once if that proves equal, else the first that does by itself.
    for steps in dict.fromkeys([tuple(wanted), *((step,) for step in wanted)]):
        problem = _problem(before, bindings, steps) if steps else ""
        if not problem:
            taken = list(steps)
            break
        against |= dict.fromkeys(steps, problem)
    if PACKED in taken:
        pack(model, padded)
        RemoveUnusedNodesPass()(model)
    work = tuple(
        Work(step, name, step in taken, told, "" if step in taken else against[step])
        for step, told in ((PACKED, saves), (TRIMMED, TRIM_SAVES))
    )
    return Removal(work, before, TRIMMED in taken)


def _padded(mask: ir.Value) -> Padded:
    keeps = declared(mask)
    return Padded(mask, 1 if keeps is None else keeps)


def _padded_of(model: ir.Model) -> Padded:
    mask = removed_padding(model)
    assert mask is not None
    return _padded(mask)


def _problem(before: ir.Model, bindings: Bindings, steps: Sequence[str]) -> str:
    """Why the whole graph is not proved to be equal without its padding; empty where it is."""
    after = before.clone()
    for step in steps:
        (pack if step == PACKED else trim)(after, _padded_of(after))
    return differs(before, after, _padded_of(before), bindings, evaluated=True)
