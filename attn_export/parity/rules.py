"""How one output is compared, as a source declares it and a manifest stores it. Numpy alone.

Written as a word, in `ExportSpec.compare` and in `--compare OUTPUT=RULE`:

    elementwise            every element within its allowed error; integers and booleans equal
    index:SCORES[:AXIS]    positions on an axis (the last one) of the output SCORES, as argmax and
                           top-k give them: they may differ among candidates that tie
    index                  the same without scores to look at, so that positions must be equal
    sorted:SCORES          rows (B, K, ...) in the order of the output SCORES (B, K): rows whose
                           scores tie may change places
    detections             rows x1, y1, x2, y2, score, class, matched by class, score and overlap

Nothing is guessed from what a tensor looks like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_export.errors import UsageError
from attn_export.parity.tolerance import Group

MODES = ("elementwise", "index", "detections")
INVERTED = "not:"


@dataclass(frozen=True)
class Rule:
    """How one output is compared.

    Attributes:
        compare: "elementwise", "index" or "detections".
        of: the output whose `axis` the positions of an "index" count; empty where none is known.
        sorted_by: the output (B, K) that the rows are in the order of.
        mask: the input (B, S) that is 0 at positions of this output (B, S, ...) that do not count;
            "not:INPUT" where it is 1 there.
    """

    compare: str = "elementwise"
    of: str = ""
    axis: int = -1
    sorted_by: str = ""
    mask: str = ""
    groups: tuple[Group, ...] = ()

    @property
    def mask_input(self) -> str:
        return self.mask.removeprefix(INVERTED)

    @property
    def word(self) -> str:
        """As `parse_rule` reads it; without mask and groups."""
        if self.sorted_by:
            return f"sorted:{self.sorted_by}"
        return f"index:{self.of}:{self.axis}" if self.of else self.compare

    def to_manifest(self) -> dict[str, Any]:
        """The keys that an entry of the manifest's `outputs` has for it."""
        extra: dict[str, Any] = {"of": self.of, "axis": self.axis} if self.of else {}
        optional = {"sorted_by": self.sorted_by, "mask": self.mask}
        extra |= {key: value for key, value in optional.items() if value}
        return {"compare": self.compare, **extra} | (
            {"groups": [vars(group) for group in self.groups]} if self.groups else {}
        )


def from_manifest(entry: Mapping[str, Any]) -> Rule:
    """The rule of an entry of the manifest's `outputs`."""
    keys = ("compare", "of", "axis", "sorted_by", "mask")
    groups = tuple(Group(**group) for group in entry.get("groups", ()))
    return Rule(**{key: entry[key] for key in keys if key in entry}, groups=groups)


def parse_rule(text: str) -> Rule:
    """The rule that a word stands for.

    Raises:
        UsageError: none of those.
    """
    kind, *rest = text.split(":")
    if kind == "sorted" and len(rest) == 1 and rest[0]:
        return Rule(sorted_by=rest[0])
    if kind == "index" and (not rest or rest[0]) and len(rest) <= 2:
        axis = rest[1] if len(rest) == 2 else "-1"
        if axis.lstrip("-").isdigit():
            return Rule("index", of=rest[0] if rest else "", axis=int(axis))
    if kind in MODES and not rest:
        return Rule(kind)
    raise UsageError(
        f"there is no way '{text}' to compare an output",
        "use elementwise, index:SCORES, sorted:SCORES or detections",
    )


def parse_pairs(option: str, values: Sequence[str], meaning: str) -> dict[str, str]:
    """`NAME=VALUE` options by name.

    Raises:
        UsageError: one without a name or a value, or a name that comes twice.
    """
    found: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{option} {text} does not parse", f"write {meaning}")
        if name in found:
            raise UsageError(f"{option} names '{name}' twice", "give it once")
        found[name] = value
    return found


def check_rules(
    rules: Mapping[str, Rule], outputs: Mapping[str, int], inputs: Mapping[str, int]
) -> None:
    """Raise UsageError where a rule names an output or input that there is not.

    Args:
        outputs, inputs: names with the number of axes of each.
    """
    for name, rule in rules.items():
        if name not in outputs:
            raise UsageError(f"there is no output '{name}'", f"name one of {', '.join(outputs)}")
        for other in (rule.of, rule.sorted_by):
            if other and (other not in outputs or other == name):
                others = ", ".join(sorted(set(outputs) - {name})) or "none, so compare elementwise"
                raise UsageError(
                    f"output '{name}' is compared by '{other}', which is no other output",
                    f"the others are {others}",
                )
        if rule.mask and rule.mask_input not in inputs:
            raise UsageError(
                f"output '{name}' is masked by '{rule.mask_input}', which is not an input",
                f"the inputs are {', '.join(inputs)}",
            )
        if rule.mask and (inputs[rule.mask_input] != 2 or outputs[name] < 2):
            raise UsageError(
                f"output '{name}' has {outputs[name]} axes and '{rule.mask_input}'"
                f" {inputs[rule.mask_input]}",
                "a mask (B, S) says which positions of an output (B, S, ...) count",
            )
        across = [g for g in rule.groups if g.axis % max(outputs[name], 1) < 2]
        if rule.mask and across:
            raise UsageError(
                f"output '{name}' has groups on axis {across[0].axis}, where its mask is",
                "mask it, or give it groups, not both",
            )
