"""A component's graph with each op in turn, and with the best op of each kind of site."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from attn_export.attention.lower import contrib_attention
from attn_export.attention.lowering import BUILDERS, Order, lower
from attn_export.attention.site import Account, Site
from attn_export.attention.unfuse import unfuse
from attn_export.capability import DECOMPOSED, KERNELS, Form, Preference, preference, why_not
from attn_export.runtimes.packages import runtime_version
from attn_export.tuning.bases import Base
from attn_export.tuning.cuts import values_of
from attn_export.tuning.sites import Kind
from attn_export.tuning.stage import Variant

PACKED, SEPARATE = "packed projections", "separate projections"


@dataclass(frozen=True)
class Lowered:
    """A base with a lowering of its sites.

    Attributes:
        op: the one that was tried first, wherever it is legal.
        known: names of the values of the canonical graph.
        kinds: sites by what they compute.
    """

    op: str
    model: ir.Model
    account: Account
    known: frozenset[str]
    kinds: tuple[Kind, ...]

    @property
    def ops(self) -> tuple[str | None, ...]:
        return tuple(outcome.lowering for outcome in self.account.outcomes)

    def ops_by_site(self) -> dict[str, str | None]:
        return {outcome.site.name: outcome.lowering for outcome in self.account.outcomes}

    def variant(self, runtime: str, name: str, how: str = "") -> Variant:
        return Variant(name, runtime, self.model, self.account.to_json(), how=how)


def lowered(
    base: Base, runtime: str, order: Order | None, op: str = "", projections: str = ""
) -> Lowered:
    """One lowering, every site proved.

    Args:
        order: as `lower` takes it.
        projections: PACKED or SEPARATE; as the base has them where it is empty.
    """
    model, finish = base.fresh()
    if projections:
        _repack(model, runtime, base, projections == PACKED)
    known = frozenset(values_of(model))
    seen: dict[str, tuple[Site, Form, tuple[int, int] | None]] = {}

    def asked(site: Site, form: Form, tokens: tuple[int, int] | None) -> Preference | None:
        seen[site.name] = (site, form, tokens)
        return order(site, form, tokens) if order is not None else None

    account = lower(model, runtime, base.sizes, order=asked)
    finish()
    return Lowered(op, model, account, known, tuple(_kinds(seen)))


def _repack(model: ir.Model, runtime: str, base: Base, packed: bool) -> None:
    """Projections into the op that holds them, and out again in the form that is wanted."""
    lower(model, runtime, base.sizes, order=first(runtime, contrib_attention.NAME))
    unfuse(model, packed=packed)


def _kinds(
    seen: Mapping[str, tuple[Site, Form, tuple[int, int] | None]],
) -> Iterator[Kind]:
    """Sites with one signature are one kind."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, (site, form, _) in seen.items():
        groups.setdefault((site.signature, form), []).append(name)
    for names in groups.values():
        site, form, tokens = seen[names[0]]
        yield Kind(site, form, tokens, tuple(names))


def first(runtime: str, op: str) -> Order:
    """One op before all others, wherever it is legal."""

    def asked(site: Site, form: Form, tokens: tuple[int, int] | None) -> Preference:
        rule = preference(runtime, form, tokens)
        return Preference(runtime, (), (op, *(o for o in rule.ops if o != op)), "", "")

    return asked


def planned(runtime: str, plan: Mapping[str, str]) -> Order:
    """The op of each site by its name; the table's for others."""

    def asked(site: Site, form: Form, tokens: tuple[int, int] | None) -> Preference | None:
        op = plan.get(site.name)
        return first(runtime, op)(site, form, tokens) if op else None

    return asked


def uniform(
    base: Base,
    runtime: str,
    progress: Callable[[str], None],
    made: Sequence[Lowered] = (),
    late: Callable[[], bool] = lambda: False,
) -> tuple[list[Lowered], list[str]]:
    """Each op on every site where it is legal; those that no site takes are left out.

    Args:
        made: what was lowered from the same base for another runtime; whatever is legal here too
            is taken as it is.
        late: whether there is no time for more than two.

    Returns:
        the lowerings, and the ops that there was no time for.
    """
    version, _ = runtime_version(runtime)

    def is_legal(op: str | None, form: Form) -> bool:
        return op is not None and why_not(op, runtime, version, form) is None

    found: list[Lowered] = []
    skipped: list[str] = []
    for op in ops_of(runtime):
        kinds = found[0].kinds if found else made[0].kinds if made else ()
        if kinds and not any(is_legal(op, kind.form) for kind in kinds):
            continue
        again = next((one for one in made if one.op == op), None)
        if again is None or not all(
            is_legal(again.ops_by_site()[name], kind.form) for kind in kinds for name in kind.names
        ):
            if len(found) > 1 and late():
                skipped.append(op)
                continue
            progress(f"lowering to {op} for {runtime}")
            again = lowered(base, runtime, first(runtime, op), op)
        if op in again.ops and all(again.ops != other.ops for other in found):
            found.append(again)
    return found, skipped


def ops_of(runtime: str) -> list[str]:
    """The ops with a kernel, in the order in which the table prefers them for a plain site."""
    kernels = {kernel.op for kernel in KERNELS if kernel.runtime == runtime}
    rule = preference(runtime, Form()).ops
    ordered: Sequence[str] = [*rule, *(op for op in BUILDERS if op not in rule)]
    return [op for op in ordered if op == DECOMPOSED or (op in kernels and op in BUILDERS)]
