"""Variants against the plain export and the best so far, within the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attn_export.bench.benchmark import PACE, Pace
from attn_export.bench.stats import FEWEST_ROUNDS, ratio_interval, summarize_rounds
from attn_export.errors import CheckFailed
from attn_export.tuning.choose import Decision, decide, is_faster
from attn_export.tuning.stage import Stage, Timed, Variant

Progress = Callable[[str], None]
QUICK = Pace(round=0.15, warm_up=0.2)
STARTING = 1.0  # seconds that processes take to start, besides what each adds
EACH = 0.8  # seconds that each adds to that, until it is known better
LONGEST = 6.0  # timed seconds of a variant
MEMORY_SHARE = 0.5  # of what is available; weights are held twice, as they are and prepacked
PROCESS_BYTES = 150 * 2**20


@dataclass
class Clock:
    """The seconds that were asked for."""

    budget: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.begun

    @property
    def left(self) -> float:
        return self.budget - self.spent


@dataclass
class Contest:
    """Measurements of one target, and the variant that is best so far.

    Attributes:
        until: when `clock` has spent so much, nothing new is begun.
        log: every variant that was measured, as JSON.
        skipped: what was not measured for lack of time, in words.
    """

    stage: Stage
    plain: Variant
    clock: Clock
    progress: Progress
    best: Variant = field(init=False)
    decision: Decision = field(init=False)
    log: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    each: float = EACH
    last: Timed = field(default_factory=Timed)

    def __post_init__(self) -> None:
        self.best = self.plain
        self.decision = Decision(self.plain.name, "nothing else was measured")

    def run(
        self, title: str, challengers: Sequence[Variant], until: float, *, least: int = 0
    ) -> None:
        """Measure challengers, in their order, beside the plain export and the best so far.

        Args:
            until: seconds of the clock; what does not fit before is skipped and said.
            least: so many challengers are measured in any case.
        """
        todo = list(challengers)
        while todo:
            standing = 1 + (self.best is not self.plain)
            room = self._room(until - self.clock.spent) - standing
            count = min(len(todo), max(room, least), self._fit() - standing)
            if count < 1:
                names = ", ".join(variant.name for variant in todo)
                self.skipped.append(f"{title} of {self.plain.runtime}: {names}")
                return
            self._measure(title, todo[:count], until)
            del todo[:count]
            least = 0

    def _room(self, seconds: float) -> int:
        """How many processes can be measured in these seconds, quickly."""
        return int((seconds - STARTING) / (self.each + FEWEST_ROUNDS * QUICK.round))

    def _fit(self) -> int:
        """How many processes the memory holds; three at least, or nothing could be compared."""
        weights = sum(
            path.stat().st_size
            for path in [self.stage.bundle.path / "weights.data"]
            if path.is_file()
        )
        room = MEMORY_SHARE * available_bytes() / (PROCESS_BYTES + 2 * weights)
        return max(3, int(room))

    def _measure(self, title: str, challengers: Sequence[Variant], until: float) -> None:
        standing = [self.plain] if self.best is self.plain else [self.plain, self.best]
        together = [*standing, *challengers]
        share = (until - self.clock.spent - STARTING) / len(together) - self.each
        pace = PACE if share > FEWEST_ROUNDS * PACE.round else QUICK
        seconds = min(max(share, FEWEST_ROUNDS * pace.round), LONGEST)
        names = ", ".join(variant.name for variant in challengers)
        self.progress(f"timing {title} on {self.plain.runtime}: {names}")
        begun = time.monotonic()
        found = self.stage.time(together, seconds, self.progress, pace)
        timed = sum(len(rounds) for rounds in found.rounds.values()) * pace.round
        took = time.monotonic() - begun - timed - STARTING
        self.each = max(0.1, took / len(together))
        if self.plain.name in found.wrong:
            raise CheckFailed(
                f"{self.plain.runtime} has other answers than PyTorch already,"
                f" {found.wrong[self.plain.name]}",
                "run `attn-export verify`, or tune another --runtime",
            )
        self._note(title, together, found)
        self.last = found
        # The best so far before what is new: it wins where both are as fast.
        ordered = {v.name: found.rounds[v.name] for v in together if v.name in found.rounds}
        self.decision = decide(ordered, self.plain.name)
        self.best = next(v for v in together if v.name == self.decision.name)

    def _note(self, title: str, variants: Sequence[Variant], found: Timed) -> None:
        for variant in variants:
            row: dict[str, Any] = {
                "stage": title,
                "name": variant.name,
                "runtime": variant.runtime,
                "how": variant.how,
                "settings": variant.settings.to_json(),
            }
            self.log.append(row | figures(found, variant.name, self.plain.name))

    def settle_spinning(self, ending: str) -> None:
        """Say that threads spin where that was faster beyond noise, as `load` lets them sleep.

        Args:
            ending: of the name of the variant whose threads sleep.
        """
        rounds, best = self.last.rounds, self.best
        sleeping = next((name for name in rounds if name.endswith(ending)), best.name)
        if best.name not in rounds or best.settings.spinning is not None:
            return
        if is_faster(rounds, best.name, sleeping):
            # Not another variant: this is what was measured, `bench` has it so anyway.
            self.best = replace(best, settings=replace(best.settings, spinning=True))
            if best is self.plain:
                self.plain = self.best


def figures(found: Timed, name: str, plain: str) -> dict[str, Any]:
    """What was measured of a variant; the ratio is to the plain export in the same rounds."""
    if name in found.wrong:
        return {"median_ms": None, "wrong": found.wrong[name]}
    rounds = found.rounds[name]
    latency = summarize_rounds(rounds)
    shown: dict[str, Any] = {
        "median_ms": latency.median, "median_low_ms": latency.low, "median_high_ms": latency.high,
        "p90_ms": latency.p90, "p99_ms": latency.p99, "runs": latency.runs, "rounds": len(rounds),
    }  # fmt: skip
    if plain in found.rounds and name != plain:
        low, high = ratio_interval(rounds, found.rounds[plain])
        ratio = latency.median / summarize_rounds(found.rounds[plain]).median
        shown |= {"ratio": ratio, "ratio_low": min(low, ratio), "ratio_high": max(high, ratio)}
    return shown


def available_bytes(path: Path = Path("/proc/meminfo")) -> int:
    """Memory that may be used without swapping; much where it cannot be told."""
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 8 * 2**30
