"""Models that are refused before a graph of them could mislead."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from attn_export.errors import ExportError
from attn_export.models.spec import ExportSpec


def refuse_other_precisions(spec: ExportSpec) -> None:
    """Raise ExportError for a model whose weights or inputs are not float32."""
    tensors = [*spec.module.parameters(), *spec.module.buffers(), *spec.inputs.values()]
    other = {t.dtype for t in tensors if t.is_floating_point()} - {torch.float32}
    if other:
        names = ", ".join(sorted(map(str, other)))
        raise ExportError(
            f"the model computes in {names}, only float32 is built yet",
            "hand over model.float() with float32 inputs",
        )


def refuse_randomness(program: ExportedProgram) -> None:
    """Raise ExportError if the graph draws random numbers, as dropout that ignores eval() does.

    Its answers would differ from run to run, and no comparison of them would mean anything.
    """
    for node in program.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue  # an input, an output, or a Python function such as getitem
        if torch.Tag.nondeterministic_seeded not in target.tags or _is_quiet(node, target):
            continue
        where = list((node.meta.get("nn_module_stack") or {}).values())
        owner = (
            f"{where[-1][1].__name__ if isinstance(where[-1][1], type) else where[-1][1]}"
            if where
            else "the model"
        )
        path = where[-1][0] if where and where[-1][0] else "its top level"
        arguments = {argument.name for argument in target._schema.arguments}
        way_out = "hand its numbers in as an input"
        if "dropout_p" in arguments:
            way_out = "pass dropout_p=p if self.training else 0.0, so that eval() turns it off"
        elif "train" in arguments:
            way_out = "pass training=self.training, so that eval() turns it off"
        raise ExportError(
            f"{target} in {owner.rsplit('.', 1)[-1]} ({path}) stays random in eval mode", way_out
        )


def _is_quiet(node: torch.fx.Node, target: torch._ops.OpOverload) -> bool:
    """A dropout that is off: probability 0, or train=False."""
    schema = target._schema
    values = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    for argument in schema.arguments:
        values.setdefault(argument.name, argument.default_value)
    if "dropout_p" in values:
        return bool(values["dropout_p"] == 0.0)
    return "train" in values and bool(values["train"] is False or values.get("p") == 0.0)
