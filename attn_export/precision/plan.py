"""Which nodes of a float32 graph stay float32 when the rest becomes half precision.

`rules` says why; nodes that were seen to overflow or to drift when the half graph ran stay as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from attn_export.attention.data import LENDERS
from attn_export.precision.magnitudes import Magnitude
from attn_export.precision.ops import MOVES, SAME_TYPE
from attn_export.precision.rules import Rules, is_float


@dataclass(frozen=True)
class Kept:
    """A node that stays float32.

    Attributes:
        code: "op", "no-kernel", "normalisation", "softmax", "cancels", "mask", "range", "index",
            "sizes", "control-flow", "overflow" or "drift".
        why: a clause about the node.
    """

    node: str
    op: str
    code: str
    why: str


@dataclass
class Plan:
    """Which nodes stay float32; all others with float values become half.

    Attributes:
        kept: by node. Nodes that merely stand between two of them, and Casts, are in `between`.
        huge: names of values whose numbers, which block keys, are cut to the half range.
    """

    kept: dict[ir.Node, Kept] = field(default_factory=dict)
    between: set[ir.Node] = field(default_factory=set)
    huge: set[str] = field(default_factory=set)

    def stays(self, node: ir.Node) -> bool:
        return node in self.kept or node in self.between


def make_plan(
    model: ir.Model,
    dtype: ir.DataType,
    runtime: str,
    seen: Mapping[str, Magnitude],
    drifting: Mapping[str, tuple[str, str]],
) -> Plan:
    """Decide for every node of the main graph.

    Args:
        model: the lowered float32 graph, its nodes in order.
        dtype: FLOAT16 or BFLOAT16.
        seen: how large each value became, by its name.
        drifting: node name -> (code, why) of those that were seen to overflow or drift.
    """
    plan = Plan()
    rules = Rules(model, dtype, runtime, seen)
    plan.huge = rules.huge_names
    for node in model.graph:
        if node.op_type in LENDERS or not any(
            is_float(value) for value in (*node.inputs, *node.outputs)
        ):
            continue
        if node.op_type in SAME_TYPE:
            plan.between.add(node)
            continue
        found = drifting.get(str(node.name)) or rules.verdict(node)
        if found is not None:
            plan.kept[node] = Kept(str(node.name), node.op_type, *found)
    _bridge(model, plan)
    return plan


def _bridge(model: ir.Model, plan: Plan) -> None:
    """Leave what only moves numbers from one float32 node to others as it is."""
    for node in model.graph:
        if node.op_type not in MOVES or plan.stays(node):
            continue
        sources = [v.producer() for v in node.inputs if v is not None and is_float(v)]
        readers = [user for output in node.outputs for user, _ in output.uses()]
        before = all(source is not None and plan.stays(source) for source in sources)
        if sources and before and readers and all(plan.stays(reader) for reader in readers):
            plan.between.add(node)


REASONS = {
    "op": "positions, or no half form",
    "no-kernel": "no half kernel",
    "normalisation": "sums, and norms that are written out",
    "softmax": "softmax outside of a fused op",
    "cancels": "exponentials, and constants beside them",
    "mask": "masks, whose numbers are out of range",
    "range": "numbers out of range",
    "index": "whole numbers, such as positions",
    "sizes": "made from sizes and constants alone",
    "control-flow": "bodies of control flow",
}


def summary(kept: Sequence[Kept]) -> list[str]:
    """A clause for each reason, with the ops that it holds for, counted."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in kept:
        seen = row.why if row.code in ("drift", "overflow") else ""
        rows.setdefault((row.code, seen), []).append(row.op)
    lines = []
    for (code, why), ops in rows.items():
        counts = ", ".join(f"{ops.count(op)} {op}" for op in dict.fromkeys(ops))
        lines.append(f"{counts} ({why or REASONS[code]})")
    return lines
