"""One target on one runtime: sites first, then whole graphs, then how they are run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attn_export import bundle as bundles
from attn_export.bench.stats import FEWEST_ROUNDS
from attn_export.errors import AttnExportError
from attn_export.reference import Case
from attn_export.tuned import Settings, settings_of
from attn_export.tuning import cache as caches
from attn_export.tuning import sites
from attn_export.tuning.bases import Base
from attn_export.tuning.contest import EACH, STARTING, Clock, Contest
from attn_export.tuning.cuts import cut_site
from attn_export.tuning.lengths import best_of, buckets, lengths, tokens_at
from attn_export.tuning.lowerings import Lowered, lowered, planned, uniform
from attn_export.tuning.sites import Kind, SiteTimes
from attn_export.tuning.stage import Stage, Variant
from attn_export.tuning.variants import PLAIN, fusions, levels, threads

Progress = Callable[[str], None]
BEFORE, MIX = "as tuned before", "best op of each site"
SLEEPING = "sleeping threads"
SITES, GRAPHS, FUSIONS = 0.3, 0.6, 0.85  # shares of a target's time until which each may begin
ACCOUNT = (
    "sites",
    "total",
    "recognised",
    "lowered",
    "refused",
    "other",
    "rotary",
    "linear",
    "work",
)


@dataclass
class Found:
    """What was found of one target.

    Attributes:
        exported: site -> the op that it had when it was exported.
        made: its graph with each op.
        unsettled: what could not be measured, and why.
    """

    target: Mapping[str, Any]
    runtime: str
    new: bool
    contest: Contest
    exported: dict[str, str | None]
    made: Sequence[Lowered] = ()
    sites: list[dict[str, Any]] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)

    @property
    def component(self) -> str:
        return str(self.target["component"])


def tune_runtime(
    bundle: bundles.Bundle,
    target: Mapping[str, Any],
    runtime: str,
    base: Base,
    case: Case,
    cases: Sequence[Case],
    folder: Path,
    clock: Clock,
    until: float,
    progress: Progress,
    *,
    cache: bool,
    new: bool,
    made: Sequence[Lowered] = (),
) -> Found:
    """Measure what there is time for.

    Args:
        until: seconds of the clock at which nothing new is begun.
        new: the target is another runtime's, whose graph is lowered for this one.
        made: what was lowered from the same base for another runtime.
    """
    folder.mkdir()
    begun = clock.spent

    def share(part: float) -> float:
        return begun + part * (until - begun)

    stage = Stage(folder, bundle, target, case.name)
    single = target["precision"] == "fp32"
    late: list[str] = []
    took = 0.0
    if single:
        made, late = uniform(base, runtime, progress, made, lambda: clock.spent > share(GRAPHS))
        took = (clock.spent - begun) / max(1, len(made))
    plain, exported = _plain(bundle, target, runtime, base, made if new else ())
    found = Found(target, runtime, new, Contest(stage, plain, clock, progress), exported, made)
    found.contest.skipped += [f"lowering to {op} for {runtime}" for op in late]
    if single:
        own = [c for c in cases if c.component == case.component]
        times = _sites(found, bundle, made, own, case, folder, share(SITES), progress)
        _describe(found, times, runtime, cache)
        variants = _mixed(base, runtime, made, times, plain)
        if isinstance(target.get("tuned"), dict) and not new:
            variants.insert(0, _as_it_is(bundle, target, BEFORE, settings_of(target)))
        found.contest.run("lowerings", variants, share(GRAPHS), least=1)
        fused, late = fusions(
            base, runtime, found.contest.best, lambda: clock.spent + 2 * took > share(FUSIONS)
        )
        found.contest.skipped += [f"fusions of {runtime}: {name}" for name in late]
        found.contest.run("fusions", fused, share(FUSIONS))
    found.contest.run("optimisation", levels(runtime, found.contest.best), share(FUSIONS))
    found.contest.run("threads", threads(runtime, found.contest.best), until)
    found.contest.settle_spinning(SLEEPING)
    return found


def _plain(
    bundle: bundles.Bundle,
    target: Mapping[str, Any],
    runtime: str,
    base: Base,
    made: Sequence[Lowered],
) -> tuple[Variant, dict[str, str | None]]:
    """What `export` makes: the file, or for a tuned one the same made again.

    Args:
        made: lowerings for a runtime that the bundle has no graph for, the usual one first.
    """
    tuned = target.get("tuned")
    before = tuned.get("exported") if isinstance(tuned, dict) else None
    if made:
        return made[0].variant(runtime, PLAIN, "as export makes it"), made[0].ops_by_site()
    if isinstance(before, dict) and target["precision"] == "fp32":
        plan = {name: op for name, op in before.items() if isinstance(op, str)}
        again = lowered(base, runtime, planned(runtime, plan))
        return again.variant(runtime, PLAIN, "as it was exported, made again"), dict(before)
    ops = {str(site["name"]): site.get("lowering") for site in target["sites"]}
    return _as_it_is(bundle, target, PLAIN, Settings()), ops


def _as_it_is(
    bundle: bundles.Bundle, target: Mapping[str, Any], name: str, settings: Settings
) -> Variant:
    model = ir.load(bundle.model_path(target))
    account = {key: target[key] for key in ACCOUNT if key in target}
    how = "the bundle's graph" + (f", {settings}" if str(settings) else "")
    return Variant(name, str(target["runtime"]), model, account, settings, how)


def _sites(
    found: Found,
    bundle: bundles.Bundle,
    made: Sequence[Lowered],
    cases: Sequence[Case],
    case: Case,
    folder: Path,
    until: float,
    progress: Progress,
) -> dict[Kind, list[SiteTimes]]:
    """Every kind of sites at every length, the timed case's first, while there is time."""
    kinds = made[0].kinds if made else ()
    clock, times = found.contest.clock, dict[Kind, list[SiteTimes]]()
    wanted = lengths(bundle, made[0].model, cases, case) if made else []
    for number, (length, kind) in enumerate((le, k) for le in wanted for k in kinds):
        name = kind.names[0]
        ops = {m.op: m for m in made if m.ops_by_site().get(name) == m.op}
        if len(ops) < 2:
            continue
        cost = STARTING + len(ops) * (EACH + FEWEST_ROUNDS * sites.PACE.round)
        if clock.spent + cost > until:
            found.contest.skipped.append(f"site {name} on {found.runtime} at {length.name}")
            continue
        progress(f"timing site {name} on {found.runtime} at {length.name}")
        try:
            cuts = cut_site({op: m.model for op, m in ops.items()}, name, made[0].known)
            given = sites.case_of(
                next(iter(ops.values())).model, cuts, length.inputs, bundle.path, length.name
            )
            place = folder / f"site-{number}"
            rounds, wrong = sites.times(cuts, given, found.runtime, place, progress)
            tokens = tokens_at(kind, length.sizes)
            row = sites.timed(kind, length.sizes, tokens, rounds, wrong)
        except (AttnExportError, ValueError) as error:
            observed = error.observed if isinstance(error, AttnExportError) else str(error)
            found.unsettled.append(f"site {name} was not timed alone: {observed}")
            continue
        times.setdefault(kind, []).append(row)
    return times


def _describe(
    found: Found, times: Mapping[Kind, Sequence[SiteTimes]], runtime: str, cache: bool
) -> None:
    """Sites for the manifest, and for exports that come after."""
    for kind, rows in times.items():
        site = kind.site
        found.sites.append(
            {
                "sites": list(kind.names), "kind": site.kind, "heads": site.heads,
                "kv_heads": site.kv_heads, "head_size": site.head_size,
                "v_head_size": site.v_head_size, "mask": site.mask, "causal": site.causal,
                "at": [row.to_json() for row in rows], "best": best_of(rows),
                "buckets": buckets(rows),
            }
        )  # fmt: skip
        for row in rows if cache else ():
            ms = {op: latency.median for op, latency in row.ms.items()}
            key = caches.key_of(runtime, site, kind.form, row.tokens)
            caches.write(key, ms, row.as_fast)


def _mixed(
    base: Base,
    runtime: str,
    made: Sequence[Lowered],
    times: Mapping[Kind, Sequence[SiteTimes]],
    plain: Variant,
) -> list[Variant]:
    """The graphs that differ from the plain one: the mix, then by what their sites took."""
    plan = {name: best_of(rows) for kind, rows in times.items() for name in kind.names}
    have = [tuple(site.get("lowering") for site in plain.account["sites"])]
    variants = []
    if len(set(plan.values())) > 1:
        mixed = lowered(base, runtime, planned(runtime, plan), MIX)
        if all(mixed.ops != other.ops for other in made) and mixed.ops not in have:
            how = ", ".join(f"{op} {n}" for op, n in Counter(map(str, mixed.ops)).items())
            variants.append(mixed.variant(runtime, MIX, how))

    def estimate(one: Lowered) -> float:
        ops = one.ops_by_site()
        return sum(
            row.ms[op].median if (op := str(ops.get(name))) in row.ms else 0.0
            for kind, rows in times.items()
            for row in rows[:1]
            for name in kind.names
        )

    others = [one for one in made if one.ops not in have]
    for one in sorted(others, key=estimate):
        how = ", ".join(f"{op} {n}" for op, n in Counter(map(str, one.ops)).items())
        variants.append(one.variant(runtime, one.op, how))
    return variants
