"""A benchmark against an older one: what became slower beyond noise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_export.bench.machine import differences
from attn_export.errors import CheckFailed, FileError, UsageError, one_line
from attn_export.storage import write_file

MARGIN = 0.05  # processes of one model differ by this much from start to start
KINDS = ("ratio_to_baseline", "median_ms")
BOUNDS = {KINDS[0]: ("ratio_low", "ratio_high"), KINDS[1]: ("median_low_ms", "median_high_ms")}


@dataclass(frozen=True)
class Change:
    """One runtime at one batch size, now over then: above 1 is slower.

    Attributes:
        of: "ratio_to_baseline" where both benchmarks have the same one, since it takes the speed
            of the machine out; else "median_ms".
        low, high: of `ratio`, with at least 90 % confidence: both intervals hold at once.
        margin: how much slower is let go.
    """

    runtime: str
    batch: int
    of: str
    ratio: float
    low: float
    high: float
    margin: float

    @property
    def verdict(self) -> str:
        if self.low > 1 + self.margin:
            return "slower"
        return "faster" if self.high < 1 / (1 + self.margin) else "same"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "verdict": self.verdict}


@dataclass(frozen=True)
class Comparison:
    """What changed, and what else is not as it was."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The "compare" of a `bench --json` object."""
        return {"changes": [c.to_json() for c in self.changes], "notes": list(self.notes)}

    def require(self) -> None:
        """Raise CheckFailed where a runtime is slower beyond noise."""
        slower = [change for change in self.changes if change.verdict == "slower"]
        if slower:
            worst = max(slower, key=lambda change: change.low)
            raise CheckFailed(
                f"{worst.runtime} takes {worst.ratio:.2f} times as long as it did"
                f" ({worst.low:.2f}..{worst.high:.2f}, batch {worst.batch})",
                "see what changed, or save a new file to compare with",
            )


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a `bench --json` object. Raises FileError where it cannot be written."""
    write_file(path, json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def read(path: Path) -> dict[str, Any]:
    """A `bench --json` object.

    Raises:
        FileError: the file is not there, or is something else.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for key in ("runtimes", "machine", "versions", "case", "model"):
            found[key]
        for row in found["runtimes"].values():
            row["median_ms"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"{path} is not what bench --save writes ({one_line(error)})", "save one again"
        ) from error
    return found


def check_machine(old: Mapping[str, Any], new: Mapping[str, Any], *, allowed: bool) -> list[str]:
    """Notes on what differs between two machines.

    Raises:
        UsageError: something does, and that is not `allowed`.
    """
    found = differences(old, new)
    if found and not allowed:
        raise UsageError(
            f"the old benchmark is of another machine ({'; '.join(found)})",
            "run it here, or compare all the same with --other-machine",
        )
    return [f"another machine: {text}" for text in found]


def compare(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    margin: float = MARGIN,
    other_machine: bool = False,
) -> Comparison:
    """Both are `bench --json` objects.

    Raises:
        UsageError: they are of different models, inputs or (unless `other_machine`) machines, or
            have no runtime in common.
    """
    for key in ("model", "component", "case"):
        if old.get(key) != new[key]:
            raise UsageError(
                f"the {key} was '{old.get(key)}' and is '{new[key]}', their times do not compare",
                "compare with a file of the same",
            )
    notes = check_machine(old["machine"], new["machine"], allowed=other_machine)
    versions = {**old["versions"], **new["versions"]}
    notes += [
        f"{name} was {old['versions'].get(name)} and is {new['versions'].get(name)}"
        for name in versions
        if old["versions"].get(name) != new["versions"].get(name)
    ]
    kind = _kind(old, new)
    changes = []
    for batch, before, after in _rows(old, new):
        for name in [name for name in after if name in before]:
            if kind == "ratio_to_baseline" and name == new["baseline"]:
                continue
            if not before[name].get(kind) or not after[name].get(kind):
                notes.append(f"{name} has no {kind} in both, so it was not compared")
                continue
            changes.append(_change(name, batch, kind, before[name], after[name], margin))
        lost = [name for name in before if name not in after]
        notes += [f"{name} is in the old benchmark alone" for name in lost]
    if not changes:
        raise UsageError("the two benchmarks have no runtime in common", "time the same runtimes")
    return Comparison(tuple(changes), tuple(dict.fromkeys(notes)))


def _kind(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Ratios to one PyTorch compare; any other baseline may be what has changed."""
    baseline = new["baseline"]
    same = baseline == old.get("baseline") and baseline in ("torch", "torch-compile")
    same = same and old["versions"].get("torch") == new["versions"].get("torch")
    return KINDS[0] if same and set(new["runtimes"]) - {baseline} else KINDS[1]


def _rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[int, Any, Any]]:
    """(batch, old rows, new rows) at each batch size that both have."""
    if old.get("batches") and new["batches"]:
        common = [batch for batch in new["batches"] if batch in old["batches"]]
        return [(int(batch), old["batches"][batch], new["batches"][batch]) for batch in common]
    before, after = _batch(old), _batch(new)
    return [(after, old["runtimes"], new["runtimes"])] if before == after else []


def _batch(result: Mapping[str, Any]) -> int:
    return next((int(row.get("batch", 1)) for row in result["runtimes"].values()), 1)


def _change(
    name: str, batch: int, kind: str, old: Mapping[str, Any], new: Mapping[str, Any], margin: float
) -> Change:
    low, high = BOUNDS[kind]
    return Change(
        name, batch, kind, new[kind] / old[kind], new[low] / old[high], new[high] / old[low], margin
    )
