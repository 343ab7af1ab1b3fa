"""Times of the ops at several sizes: lowering_table.json, which benchmarks/lowering_table.py makes.

A table of another machine says little of small differences, so only clear ones change an order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attn_export.capability.form import Form
from attn_export.capability.kernels import DECOMPOSED

TABLE = Path(__file__).with_name("lowering_table.json")
CLEAR = 1.1  # a shipped time that is longer by less says nothing about another machine
NEAR = 1.0  # octaves: sizes within half and twice of those that were measured


@dataclass(frozen=True)
class Measured:
    """What each op took for one attention.

    Attributes:
        ms: op -> median of one call in milliseconds.
        where: the sizes, in words.
        source: machine and versions, in words.
        clear: an op that takes less than so many times as long is as fast.
    """

    ms: Mapping[str, float]
    where: str
    source: str
    clear: float = CLEAR

    def order(self, rule: Sequence[str]) -> tuple[str, ...]:
        """Fastest first; of those that are as fast, the first of the rule. What was not measured
        comes last, as in the rule."""
        names = [*rule, *([] if DECOMPOSED in rule else [DECOMPOSED])]
        left = [name for name in names if name in self.ms]
        found: list[str] = []
        while left:
            best = min(self.ms[name] for name in left)
            found.append(next(name for name in left if self.ms[name] < best * self.clear))
            left.remove(found[-1])
        return (*found, *(name for name in rule if name not in found))

    @property
    def why(self) -> str:
        """A clause about the first op."""
        ranked = sorted(self.ms, key=self.ms.__getitem__)
        times = ", ".join(f"{name} {self.ms[name]:.3g} ms" for name in ranked)
        return f"{times} at {self.where}"


def nearest(runtime: str, form: Form, tokens: tuple[int, int] | None = None) -> Measured | None:
    """The row whose sizes are nearest; None where none is near, or nothing was measured.

    Args:
        tokens: S and T, where those of the form are symbolic.
    """
    given = form.query_tokens, form.key_tokens
    S, T = given if all(isinstance(size, int) for size in given) else tokens or (0, 0)
    if not (isinstance(S, int) and isinstance(T, int) and S and T and form.head_size):
        return None
    if form.cache or form.dtype != "float32" or form.kv_heads != form.heads:
        return None
    wanted = (S, T, form.heads * form.head_size)
    mask = mask_of(form)
    near = [row for row in rows() if row["runtime"] == runtime and row["mask"] == mask]
    if not near:
        return None
    row = min(near, key=lambda row: _distance(wanted, row))
    if _distance(wanted, row) > NEAR:
        return None
    where = f"{row['tokens']} tokens, {row['heads']} heads of {row['head_size']}"
    where += {"none": "", "dense": ", a dense mask", "causal": ", causal"}[row["mask"]]
    return Measured(row["ms"], where, sources()[runtime])


def mask_of(form: Form) -> str:
    """The mask form of a table's row: "causal" where the op itself does it."""
    if form.causal != "none":
        return "causal"
    return "none" if form.mask == "none" else "dense"


def _distance(wanted: tuple[int, int, int], row: Mapping[str, Any]) -> float:
    """The largest of the differences, in octaves."""
    have = (row["tokens"], row["tokens"], row["heads"] * row["head_size"])
    return max(abs(math.log2(a / b)) for a, b in zip(wanted, have, strict=True))


def sources() -> dict[str, str]:
    """Runtime -> machine, versions and day, in words."""
    return dict(_table()["sources"])


def rows() -> list[dict[str, Any]]:
    """{"runtime", "mask", "heads", "head_size", "tokens", "ms": {op: milliseconds}}."""
    return list(_table()["rows"])


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found
