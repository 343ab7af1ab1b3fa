"""What `tune` found: the object that `tune --json` prints, and the manifest's `tuned`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_export.bench.machine import machine
from attn_export.runtimes.packages import versions
from attn_export.runtimes.threads import cores
from attn_export.tuning.runtime import Found
from attn_export.tuning.together import Chosen, Kept


@dataclass
class Tuned:
    """All targets of a bundle.

    Attributes:
        done: every target that was measured, also one that is not kept.
        chosen: what was decided, a component each.
        seconds: that it took; `budget` those that were asked for.
        changed: whether a graph of the bundle was replaced or added.
    """

    bundle: str
    done: Sequence[Found]
    chosen: Sequence[Chosen]
    notes: list[str]
    budget: float
    seconds: float
    changed: bool = False

    @property
    def not_measured(self) -> list[str]:
        """What was left out for lack of time, or could not be measured, in words."""
        skipped = [f"{what} (no time left)" for one in self.done for what in one.contest.skipped]
        return skipped + [what for one in self.done for what in one.unsettled]

    def kept(self) -> list[Kept]:
        return [kept for chosen in self.chosen for kept in chosen.kept]

    def to_json(self) -> dict[str, Any]:
        """The `tune --json` object."""
        return {
            "bundle": self.bundle,
            "targets": [
                {**_names(kept), **self.entry(kept), "variants": kept.found.contest.log}
                for kept in self.kept()
            ],
            "runtimes": {
                one.component: {"runtime": one.runtime, "why": one.why, "together": one.log}
                for one in self.chosen
            },
            "not_measured": self.not_measured,
            "notes": list(self.notes),
            "budget": self.budget,
            "seconds": self.seconds,
            "changed": self.changed,
            "machine": machine(cores()),
            "versions": versions(),
        }

    def entry(self, kept: Kept) -> dict[str, Any]:
        """The manifest's `tuned` of a target."""
        contest = kept.found.contest
        return {
            "chosen": kept.variant.name,
            "how": kept.variant.how,
            "why": kept.decision.why,
            "settings": kept.variant.settings.to_json(),
            "median_ms": kept.figures.get("median_ms"),
            "plain_ms": kept.plain_ms,
            "ratio": kept.figures.get("ratio", 1.0),
            "case": contest.stage.case,
            "measured": contest.log,
            "sites": kept.found.sites,
            "not_measured": contest.skipped + kept.found.unsettled,
            "exported": kept.found.exported,
            "budget": self.budget,
            "machine": machine(cores()),
            "versions": versions(),
        }


def _names(kept: Kept) -> dict[str, Any]:
    target = kept.found.target
    return {
        "name": target["name"], "runtime": kept.found.runtime, "component": target["component"],
        "precision": target["precision"], "new": kept.found.new,
    }  # fmt: skip
