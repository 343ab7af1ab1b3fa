"""What a bisection found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from attn_export.parity.deviation import Deviation
from attn_export.parity.flow import Place

Cause = Literal["graph", "kernel", "graph or kernel", "runtime", "precision", "unknown"]
Yardstick = Literal["pytorch", "twin"]

_TWIN = "The same graph without optimisations, in float32 on ONNX Runtime's CPU provider, is"
_CAUSES: dict[Cause, str] = {
    "graph": (
        f"{_TWIN} wrong there too, and so is ONNX's reference evaluator from the same inputs: the"
        " graph is to blame"
    ),
    "kernel": (
        f"{_TWIN} wrong there too, and ONNX's reference evaluator is right from the same inputs: a"
        " kernel of the runtime is to blame"
    ),
    "graph or kernel": (
        f"{_TWIN} wrong there too: the graph is to blame, or a kernel that both share"
    ),
    "runtime": f"{_TWIN} right there: the runtime is to blame",
    "precision": f"{_TWIN} right there: 16 bits are to blame",
    "unknown": "Whether the graph or the runtime is to blame was not told apart",
}
_YARDSTICKS: dict[Yardstick, str] = {
    "pytorch": "PyTorch in float64, stored at export",
    "twin": "the same graph in float32 without optimisations",
}


@dataclass(frozen=True)
class Drift:
    """The first value of a graph that leaves its budget on the way to a wrong output.

    Attributes:
        place: the node that is to blame, the first of `between` that computes with the inputs;
            that of a site where one is among them.
        between: names of all nodes between values that are right and this one.
        deviation: None where only the output itself is known to be wrong.
        compared: how many values were compared.
        hidden_by: the error is gone while this value is looked at, so that the runtime's own
            fusion across it is to blame; values were looked at one at a time then.
        case: on which it was found.
    """

    value: str
    place: Place | None
    between: tuple[str, ...]
    deviation: Deviation | None
    cause: Cause
    yardstick: Yardstick
    compared: int
    one_at_a_time: bool = False
    hidden_by: str = ""
    case: str = ""

    @property
    def site(self) -> str:
        """Name of the attention site that drifts first; empty where it is another node."""
        return self.place.site if self.place else ""

    def lines(self) -> list[str]:
        """In words: where and how far, then what is to blame and how that is known."""
        where = str(self.place) if self.place else "the graph's inputs"
        told = f"'{self.value}' is wrong" if self.deviation is None else str(self.deviation)
        first = f"First drift at {where}: {told}"
        others = len(self.between) - 1
        if others > 0 and not self.site:
            more = "one more node leads" if others == 1 else f"{others} more nodes lead"
            first += f"; {more} to it from values that are right"
        if self.hidden_by:
            first = (
                f"First drift at {where}: the error is gone while '{self.hidden_by}' is looked at,"
                " so a fusion of the runtime across it is to blame"
            )
        elif self.one_at_a_time:
            first += "; the error is gone while all values are looked at, so it was one at a time"
        how = f"{self.compared} values against {_YARDSTICKS[self.yardstick]}"
        on = f", case {self.case}" if self.case else ""
        return [f"{first}.", f"{_CAUSES[self.cause]} ({how}{on})."]

    def to_json(self) -> dict[str, Any]:
        """The `first_drift` of `verify --json`."""
        found = self.deviation
        place = asdict(self.place) if self.place else dict.fromkeys(Place.__dataclass_fields__)
        return {
            **place,
            "value": self.value,
            "between": list(self.between),
            "error": _number(found.error) if found else None,
            "allowed": found.allowed if found else None,
            "where": list(found.where) if found and found.where is not None else None,
            "got": _number(found.got) if found else None,
            "expected": _number(found.expected) if found else None,
            "largest": found.largest if found else None,
            "overflows": found.overflows if found else False,
            "dtype": found.dtype if found else None,
            "cause": self.cause,
            "yardstick": self.yardstick,
            "compared": self.compared,
            "one_at_a_time": self.one_at_a_time,
            "hidden_by": self.hidden_by or None,
            "case": self.case,
            "text": " ".join(self.lines()),
        }


def _number(value: float) -> float | str:
    """JSON has no NaN or infinity: they become strings."""
    return value if np.isfinite(value) else str(value)
