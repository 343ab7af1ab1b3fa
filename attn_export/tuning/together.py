"""The best of each runtime beside each other and beside the plain exports, one last time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.bench.benchmark import PACE
from attn_export.bench.stats import FEWEST_ROUNDS
from attn_export.reference import Case
from attn_export.tuning.choose import Decision, decide
from attn_export.tuning.contest import LONGEST, QUICK, STARTING, Clock, figures
from attn_export.tuning.runtime import Found
from attn_export.tuning.stage import Stage, Variant

Progress = Callable[[str], None]


@dataclass
class Kept:
    """What is kept of one target.

    Attributes:
        decision: the plain export, or the one that was best when all were measured again.
        figures: what the kept one took, the ratio to the plain export of the same rounds.
        plain_ms: what the plain export took there.
    """

    found: Found
    variant: Variant
    decision: Decision
    figures: Mapping[str, Any]
    plain_ms: float | None

    @property
    def is_plain(self) -> bool:
        return self.variant is self.found.contest.plain


@dataclass
class Chosen:
    """What was decided for one component."""

    component: str
    kept: list[Kept]
    runtime: str
    why: str
    log: list[dict[str, Any]] = field(default_factory=list)


def compare(
    bundle: bundles.Bundle,
    done: Sequence[Found],
    folder: Path,
    timed: Mapping[str, Case],
    clock: Clock,
    progress: Progress,
) -> list[Chosen]:
    """For each component, which graph each runtime keeps and which runtime is the fastest.

    Runtimes in other precisions than float32 keep what their own measurements say.
    """
    found = []
    for component in bundle.components:
        mine = [one for one in done if one.component == component]
        single = [one for one in mine if one.target["precision"] == "fp32"]
        others = [_alone(one) for one in mine if one not in single]
        if single:
            place = folder / f"together-{component}"
            place.mkdir()
            chosen = _together(bundle, single, place, timed[component], clock, progress)
            found.append(replace(chosen, kept=[*chosen.kept, *others]))
        elif others:
            runtime = others[0].found.runtime
            found.append(Chosen(component, others, runtime, "no other was tuned"))
    return found


def _alone(one: Found) -> Kept:
    """By the last measurement of its own."""
    contest = one.contest
    plain = contest.plain.name
    rounds = contest.last.rounds
    shown = figures(contest.last, contest.best.name, plain) if contest.best.name in rounds else {}
    own = figures(contest.last, plain, plain)["median_ms"] if plain in rounds else None
    return Kept(one, contest.best, contest.decision, shown, own)


def _together(
    bundle: bundles.Bundle,
    mine: Sequence[Found],
    folder: Path,
    case: Case,
    clock: Clock,
    progress: Progress,
) -> Chosen:
    primary = mine[0]
    if len(mine) == 1 and primary.contest.best is primary.contest.plain:
        kept = _alone(primary)
        return Chosen(primary.component, [kept], primary.runtime, "the only one that was tuned")
    variants: dict[str, tuple[Found, Variant]] = {}
    for one in mine:
        for variant in dict.fromkeys((one.contest.plain, one.contest.best)):
            variants[f"{one.runtime}: {variant.name}"] = (one, variant)
    share = (clock.left - STARTING) / len(variants) - primary.contest.each
    pace = PACE if share > FEWEST_ROUNDS * PACE.round else QUICK
    seconds = min(max(share, FEWEST_ROUNDS * pace.round), LONGEST)
    progress("timing the best of each runtime together")
    stage = Stage(folder, bundle, primary.target, case.name)
    asked = [replace(variant, name=name) for name, (_, variant) in variants.items()]
    seen = stage.time(asked, seconds, progress, pace)
    log = [
        {"stage": "together", "name": name, "runtime": one.runtime, "how": variant.how,
         **figures(seen, name, f"{primary.runtime}: {primary.contest.plain.name}")}
        for name, (one, variant) in variants.items()
    ]  # fmt: skip
    final: list[Kept] = []
    for one in mine:
        own = {n: v for n, (o, v) in variants.items() if o is one}
        plain = f"{one.runtime}: {one.contest.plain.name}"
        rounds = {name: seen.rounds[name] for name in own if name in seen.rounds}
        if plain not in rounds:  # answers that were right before are wrong now
            continue
        decision = decide(rounds, plain)
        told = Decision(own[decision.name].name, _why(decision, one))
        shown = figures(seen, decision.name, plain)
        own_ms = figures(seen, plain, plain)["median_ms"]
        final.append(Kept(one, own[decision.name], told, shown, own_ms))
    runtime, why = _fastest(final, seen.rounds)
    return Chosen(primary.component, final, runtime, why, log)


def _why(decision: Decision, one: Found) -> str:
    """Of a single variant the last measurement tells nothing, but those before it do."""
    best = one.contest.best
    return one.contest.decision.why if best is one.contest.plain else decision.why


def _fastest(kept: Sequence[Kept], rounds: Mapping[str, list[list[float]]]) -> tuple[str, str]:
    """The runtime, the first where none is faster beyond noise."""
    if len(kept) == 1:
        return kept[0].found.runtime, "the only one that was tuned"
    names = {f"{k.found.runtime}: {k.variant.name}": k.found.runtime for k in kept}
    ordered = {name: rounds[name] for name in names}
    decision = decide(ordered, next(iter(ordered)))
    medians = ", ".join(f"{k.found.runtime} {k.figures['median_ms']:.3g} ms" for k in kept)
    taken = names[decision.name]
    first = names[next(iter(ordered))]
    clause = "" if taken != first else ", where no other is faster beyond noise"
    return taken, medians + clause
