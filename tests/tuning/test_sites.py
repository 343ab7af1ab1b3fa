"""Sites cut out of real graphs, each op beside the others, with PyTorch's answers at both ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_export import bundle as bundles
from attn_export.capability import CONTRIB_ATTENTION, DECOMPOSED, STANDARD_ATTENTION
from attn_export.runtimes import ort_cpu
from attn_export.tuned import Settings
from attn_export.tuning import bases, cache, lowerings, sites
from attn_export.tuning.contest import Clock, Contest
from attn_export.tuning.cuts import Cuts, cut_site
from attn_export.tuning.runtime import Found, _as_it_is, _describe, _sites
from attn_export.tuning.stage import Stage
from attn_export.tuning.variants import PLAIN

CPU, FIRST, LAST = "ort-cpu", "blocks.0.attn", "blocks.5.attn"


@pytest.fixture(scope="module")
def made(digits_bundle: Path) -> list[lowerings.Lowered]:
    bundle = bundles.read(digits_bundle)
    sizes = bases.sizes_of(bundle, bundle.cases(), "batch=1")
    assert sizes == [{"batch": 3}, {"batch": 2}, {"batch": 1}]
    made, skipped = lowerings.uniform(
        bases.from_file(bundle, bundle.targets()[0], sizes), CPU, print
    )
    assert skipped == []
    return made


def cuts_of(made: list[lowerings.Lowered], site: str) -> Cuts:
    models = {one.op: one.model for one in made if one.ops_by_site()[site] == one.op}
    return cut_site(models, site, made[0].known)


def test_each_op_lowers_every_site_where_it_is_legal(made: list[lowerings.Lowered]) -> None:
    """The pruned last block has one query, so that its projections cannot be one product."""
    by_op = {one.op: one.ops for one in made}
    assert by_op[DECOMPOSED] == (DECOMPOSED,) * 6
    assert by_op[STANDARD_ATTENTION] == (STANDARD_ATTENTION,) * 6
    assert by_op[CONTRIB_ATTENTION] == (*(CONTRIB_ATTENTION,) * 5, STANDARD_ATTENTION)
    assert [kind.names for kind in made[0].kinds] == [tuple(f"blocks.{n}.attn" for n in range(5)),
                                                      (LAST,)]  # fmt: skip


def test_a_cut_begins_and_ends_where_all_graphs_agree(made: list[lowerings.Lowered]) -> None:
    """One node on one side, three projections and the attention on the other."""
    cuts = cuts_of(made, FIRST)
    ops = {op: [node.op_type for node in part.graph.node] for op, part in cuts.parts.items()}
    assert (len(cuts.begins), len(cuts.ends)) == (1, 1)
    assert ops[CONTRIB_ATTENTION] == ["Attention"]
    assert ops[STANDARD_ATTENTION] == ["MatMul", "Add"] * 3 + ["Attention"]
    assert ops[DECOMPOSED].count("Softmax") == 1


def test_the_parts_compute_the_same(made: list[lowerings.Lowered], digits_bundle: Path) -> None:
    bundle = bundles.read(digits_bundle)
    inputs = bundle.cases()[0].inputs
    for site in (FIRST, LAST):
        cuts = cuts_of(made, site)
        case = sites.case_of(made[-1].model, cuts, inputs, bundle.path, "c")
        for part in cuts.parts.values():
            with ort_cpu.load(part.SerializeToString(), 1) as session:
                found = session.run(case.inputs)
            for name, array in case.outputs.items():
                error = float(np.abs(found[name] - array).max())
                assert error <= case.allowed[name]["all"] < 1e-3


def test_a_site_that_is_not_there_is_not_cut(made: list[lowerings.Lowered]) -> None:
    models = {one.op: one.model for one in made}
    with pytest.raises(ValueError, match="'nowhere' is not in the main graph"):
        cut_site(models, "nowhere", made[0].known)
    with pytest.raises(ValueError, match="nothing behind 'blocks"):
        cut_site(models, FIRST, [])


def test_sites_are_timed_and_kept_for_later_exports(
    made: list[lowerings.Lowered],
    digits_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTN_EXPORT_CACHE", str(tmp_path / "cache"))
    bundle = bundles.read(digits_bundle)
    (target,) = bundle.targets()
    plain = _as_it_is(bundle, target, PLAIN, Settings())
    stage = Stage(tmp_path, bundle, target, "batch=1")
    contest = Contest(stage, plain, Clock(1e9), lambda _: None)
    found = Found(target, CPU, False, contest, {}, made)
    cases = bundle.cases()
    times = _sites(found, bundle, made, cases, cases[0], tmp_path, 1e9, lambda _: None)
    _describe(found, times, CPU, True)
    assert [row["sites"][0] for row in found.sites] == [FIRST, LAST]
    (at,) = found.sites[0]["at"]
    assert (at["tokens"], at["sizes"]) == ([17, 17], {"batch": 1})
    assert at["ops"].keys() >= {CONTRIB_ATTENTION, STANDARD_ATTENTION, DECOMPOSED}
    assert at["best"] in at["ops"]
    assert (at["wrong"], found.unsettled, contest.skipped) == ({}, [], [])
    kind = next(iter(times))
    measured = cache.read(cache.key_of(CPU, kind.site, kind.form, (17, 17)))
    assert measured is not None
    assert measured.ms == {op: row["median_ms"] for op, row in at["ops"].items()}
