"""Lower every site of a canonical graph for one target, each rewrite proved before applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attn_export.attention.apply import apply, drop_unused_initializers
from attn_export.attention.beside import lower_linear, lower_rotary, with_folded
from attn_export.attention.canonical import canonicalise
from attn_export.attention.count import count, others
from attn_export.attention.find import find
from attn_export.attention.form import form_of
from attn_export.attention.fused import is_fused
from attn_export.attention.grouped import GROUPED, ungroup
from attn_export.attention.lower import (
    contrib_attention,
    decomposed,
    group_query_attention,
    multi_head_attention,
    standard,
)
from attn_export.attention.lower.cache import cache_of
from attn_export.attention.lower.rewrite import Rewrite
from attn_export.attention.metadata import name_nodes
from attn_export.attention.padding import removed_padding
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Account, Outcome, Proved, Site, Status
from attn_export.attention.sizes import evaluate
from attn_export.attention.work.fewer_tokens import fewer_tokens
from attn_export.attention.work.remove_padding import remove_padding
from attn_export.capability import FOLDS_ROTARY, KERNELS, Form, Preference, preference, why_not
from attn_export.errors import UsageError
from attn_export.runtimes import openvino, ort_cpu
from attn_export.runtimes.packages import onnxruntime_owner, runtime_version

Progress = Callable[[str], None]
Order = Callable[[Site, Form, tuple[int, int] | None], Preference | None]
"""The order in which ops are tried for a site whose S and T are these at the example's sizes; None
where that is left to the table."""
BUILDERS: dict[str, Callable[[Site], Rewrite]] = {
    module.NAME: module.build
    for module in (
        contrib_attention,
        multi_head_attention,
        group_query_attention,
        standard,
        decomposed,
    )
}
CONTRIB = "com.microsoft."
LESS_WORK_MEASURED = (ort_cpu.NAME, openvino.NAME)
CHOICES = ("auto", "contrib", "standard", "decomposed")


def lower(
    model: ir.Model,
    runtime: str,
    sizes: Sequence[Mapping[str, int]],
    choice: str = "auto",
    progress: Progress = lambda _: None,
    *,
    less_work: bool = True,
    dtype: str | None = None,
    without: Collection[str] = (),
    in_place: Collection[str] = (),
    order: Order | None = None,
    padding_left: str = "",
) -> Account:
    """Replace each site of `model`, in place, by the first op that is legal there and proves equal.

    Args:
        runtime: what the graph is for, e.g. "ort-cpu".
        sizes: values for the symbolic sizes, one mapping a proof case, the example's last.
        choice: one of CHOICES; anything but "auto" restricts the ops that are tried.
        less_work: take out what reaches no output, where that was measured to be faster.
        dtype: what attention will be computed in, where that is not the graph's own: the graph is
            converted afterwards, and the ops must have kernels for it.
        without: ops that are not tried.
        in_place: inputs that are caches to be continued in place, which GroupQueryAttention does.
        order: asked before the table, where `choice` is "auto".
        padding_left: why padding stays that was declared to be removed.

    Raises:
        UsageError: an unknown choice, or one that the runtime has no op for.
        RuntimeUnavailable: no onnxruntime to prove on.
    """
    check_choice(runtime, choice)
    given = model.clone() if removed_padding(model) is not None else model
    name_nodes(model)
    counted, other = count(model), tuple(others(model))
    onnxruntime_owner()  # proofs run on it, whatever the graph is for
    version, _ = runtime_version(runtime)
    sums = [entry.partition(": ")[2] for entry in other if entry.startswith("linear: ")]
    linear = lower_linear(model, runtime, version, sizes, choice, sums, dtype)
    canonical = canonicalise(model, counted, sizes)
    ungroup(model, sizes)
    left = _why_left(runtime, less_work)
    work = fewer_tokens(model, sizes, left)
    removal = remove_padding(model, sizes, left or padding_left)
    sites = find(model, canonical.refused)
    known = canonical.replaced | {str(site.node.name).removesuffix(GROUPED) for site in sites}
    rotary = lower_rotary(model, runtime, version, sizes, choice, dtype)
    proved: set[tuple[object, ...]] = set()
    outcomes = []
    for index, site in enumerate(sites):
        progress(f"proving {site.name} ({index + 1} of {len(sites)})")
        refusal = canonical.refused.get(str(site.node.name))
        kept = continues(site, in_place)
        if is_fused(site.node):
            outcome = _as_given(site, runtime)
        elif refusal is None:
            outcome = _lower_site(
                model, site, runtime, version, sizes, choice, proved, dtype, without, kept, order
            )
        else:
            outcome = Outcome(site, None, "refused", (refusal,))
        outcomes.append(replace(outcome, example_tokens=_tokens(site, sizes), in_place=kept))
    if outcomes or rotary or linear:
        RemoveUnusedNodesPass()(model)
        drop_unused_initializers(model)
        rotary = with_folded(model, rotary, runtime)
        name_nodes(model)  # a graph that was lowered before has names like those of new nodes
    if problem := removal.finish(model, sizes):
        model.graph = given.graph
        return lower(
            model, runtime, sizes, choice, progress, less_work=less_work, dtype=dtype,
            without=without, in_place=in_place, order=order, padding_left=problem,
        )  # fmt: skip
    unseen = NotLowerable(Reason.NOT_RECOGNISED, "it is counted, but the finder does not take it")
    unrecognised = tuple(
        (name, unseen.reason, str(unseen)) for name in counted if name not in known
    )
    return Account(tuple(outcomes), len(counted), unrecognised, other, rotary, linear,
                   work + removal.work)  # fmt: skip


def _why_left(runtime: str, less_work: bool) -> str:
    """Why work that reaches no output stays; empty where it is taken out."""
    if not less_work:
        return "--keep-work"
    return "" if runtime in LESS_WORK_MEASURED else f"it was not measured on {runtime}"


def _as_given(site: Site, runtime: str) -> Outcome:
    """A node that the file has already; nothing is changed, so there is nothing to prove."""
    op = f"{CONTRIB}{site.node.op_type}"
    if not any(kernel.op == op and kernel.runtime == runtime for kernel in KERNELS):
        missing = NotLowerable(Reason.NO_KERNEL, f"{runtime} has no kernel for {op}")
        return Outcome(site, None, "refused", (missing,))
    return Outcome(site, op, "lowered", rule="it was fused before")


def _tokens(site: Site, sizes: Sequence[Mapping[str, int]]) -> tuple[int, int] | None:
    """S and T at the last sizes, which are the example's own."""
    try:
        found = [evaluate(size, sizes[-1] if sizes else {}) for size in site.tokens]
    except ValueError:
        return None
    return found[0], found[1]


def check_choice(runtime: str, choice: str) -> None:
    """Raise UsageError for a choice that is unknown, or that leaves no op on the runtime."""
    if choice not in CHOICES:
        raise UsageError(f"there is no lowering '{choice}'", f"choose one of {', '.join(CHOICES)}")
    if choice == "contrib" and not any(
        kernel.runtime == runtime and kernel.op.startswith(CONTRIB) for kernel in KERNELS
    ):
        raise UsageError(
            f"{runtime} has no com.microsoft op, so --lowering contrib leaves nothing to lower to",
            "choose auto, standard or decomposed, or another --target",
        )


def candidates(choice: str, preferred: Preference) -> tuple[str, ...]:
    """The ops to try, the preferred one first."""
    if choice == "standard":
        return (standard.NAME,)
    if choice == "decomposed":
        return (decomposed.NAME,)
    ops = tuple(op for op in preferred.ops if op in BUILDERS)
    return tuple(op for op in ops if choice == "auto" or op.startswith(CONTRIB))


def _lower_site(
    model: ir.Model,
    site: Site,
    runtime: str,
    version: str,
    sizes: Sequence[Mapping[str, int]],
    choice: str,
    proved: set[tuple[object, ...]],
    dtype: str | None,
    without: Collection[str],
    kept: bool,
    order: Order | None,
) -> Outcome:
    opset = model.opset_imports.get("", 23)
    try:
        form = form_of(site, "", opset, dtype)
    except NotLowerable as unknown:
        return Outcome(site, None, "refused", (unknown,))
    tokens = _tokens(site, sizes)
    asked = order(site, form, tokens) if order and choice == "auto" and not kept else None
    preferred = asked or preference(runtime, form, tokens)
    wanted = tuple(op for op in candidates(choice, preferred) if op not in without)
    if kept:
        wanted = (group_query_attention.NAME,)
    reasons: dict[str, NotLowerable] = {}
    # A site that no fused op takes is decomposed, since its own node may not run on the runtime.
    for op in dict.fromkeys([*wanted, decomposed.NAME]):
        if not _take(model, op, site, runtime, version, sizes, proved, reasons, dtype, kept):
            continue
        status: Status = "lowered"
        rule = _rule("auto", asked) if asked is not None and wanted[:1] == (op,) else ""
        if op == decomposed.NAME:
            status = "decomposed-by-choice" if op in wanted else "refused"
            rule = _rule(choice, preferred) if op in wanted else ""
        # Proofs run on the CPU provider, bfloat16 in float32; for anything else that stands in.
        itself = runtime == ort_cpu.NAME and form.dtype != "bfloat16"
        proved_on: Proved = "run" if itself else "stand-in"
        return Outcome(site, op, status, _general_last(reasons), proved_on, rule=rule)
    return Outcome(site, None, "refused", _general_last(reasons))


def _take(
    model: ir.Model,
    op: str,
    site: Site,
    runtime: str,
    version: str,
    sizes: Sequence[Mapping[str, int]],
    proved: set[tuple[object, ...]],
    reasons: dict[str, NotLowerable],
    dtype: str | None,
    kept: bool,
) -> bool:
    """Whether an op took the site, with its lengths if it has some, or else with its dense mask."""
    lengths = site.mask == "lengths" and op != decomposed.NAME
    builders = _builders(op, runtime, kept)
    for way, build in product((site, site.dense) if lengths else (site.dense,), builders):
        signature = (op, build, *way.signature)
        try:
            if op.startswith(CONTRIB) and not (way.head_size and way.v_head_size):
                raise NotLowerable(Reason.HEADS, "its head size is not fixed")
            form = form_of(way, op, model.opset_imports.get("", 23), dtype)
            if kept:  # sessions refuse several tokens of several rows behind a past
                form = replace(form, batch=1)
            if refusal := why_not(op, runtime, version, form):
                raise NotLowerable(Reason(refusal.code), str(refusal))
            apply(model, build(way), sizes, brief=signature in proved)
        except NotLowerable as reason:
            if build is builders[-1]:
                reasons[op] = reason
            continue
        proved.add(signature)
        return True
    return False


def _builders(op: str, runtime: str, kept: bool) -> list[Callable[[Site], Rewrite]]:
    """The ways to build an op, the preferred one first."""
    if op != group_query_attention.NAME:
        return [BUILDERS[op]]
    module = group_query_attention
    turning, plain = (
        (module.build_first_turning, module.build_first)
        if kept
        else (module.build_turning, BUILDERS[op])
    )
    return [turning, plain] if runtime in FOLDS_ROTARY else [plain]


def continues(site: Site, in_place: Collection[str]) -> bool:
    """Whether a site's cache is one of those inputs."""
    if not in_place or site.node.op_type != "Attention":  # not made canonical
        return False
    try:
        cache = cache_of(site)
    except NotLowerable:
        return False
    return cache is not None and str(cache.past_key.name) in in_place


def _rule(choice: str, chosen: Preference) -> str:
    """Why the op that was taken is the one that is wanted."""
    if choice == "decomposed":
        return "--lowering decomposed"
    return f"{chosen.why} ({chosen.source})" if chosen.why else ""


def _general_last(reasons: Mapping[str, NotLowerable]) -> tuple[NotLowerable, ...]:
    """In the order in which the ops were tried, but the standard one behind the special ones."""
    general = (standard.NAME, decomposed.NAME)
    ordered = sorted(reasons, key=lambda op: general.index(op) + 1 if op in general else 0)
    return tuple(reasons[op] for op in ordered)
