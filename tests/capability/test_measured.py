"""The order of ops by a table of times: only what is clearly faster at sizes like these counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_export.capability import (
    CONTRIB_ATTENTION,
    DECOMPOSED,
    KERNELS,
    MULTI_HEAD_ATTENTION,
    STANDARD_ATTENTION,
    Form,
    preference,
)
from attn_export.capability import measured as table
from attn_export.capability.measured import Measured, nearest, rows, sources

CPU = "ort-cpu"
A, M, S = CONTRIB_ATTENTION, MULTI_HEAD_ATTENTION, STANDARD_ATTENTION
ROWS = [
    {"runtime": CPU, "mask": "none", "heads": 8, "head_size": 64, "tokens": 100,
     "ms": {A: 2.0, S: 1.0, M: 1.05, DECOMPOSED: 3.0}},
    {"runtime": CPU, "mask": "none", "heads": 8, "head_size": 64, "tokens": 1000,
     "ms": {A: 10.0, S: 10.5, M: 10.9, DECOMPOSED: 5.0}},
]  # fmt: skip


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_table", lambda: {"sources": {CPU: "here"}, "rows": ROWS})


def sized(tokens: int | str, **changes: object) -> Form:
    return replace(Form(), query_tokens=tokens, key_tokens=tokens, **changes)


@pytest.mark.parametrize(("usual", "first"), [((512, 512), A), ((4096, 4096), M)])
def test_many_keys_are_those_of_the_usual_length_where_it_varies(
    usual: tuple[int, int], first: str
) -> None:
    """Three heads of 64 were not measured at such lengths, so the rule decides."""
    form = replace(sized("tokens"), heads=3, kv_heads=3, head_size=64)
    assert preference(CPU, form, usual).ops[0] == first
    assert (
        preference(CPU, replace(form, query_tokens=usual[0], key_tokens=usual[1])).ops[0] == first
    )


def test_ops_that_are_clearly_faster_come_first_and_ties_keep_the_rule() -> None:
    found = Measured({A: 2.0, S: 1.0, M: 1.05}, "", "")
    assert found.order((A, M, S)) == (M, S, A)
    assert found.order((A, S, M)) == (S, M, A)
    assert Measured({A: 1.09, S: 1.0}, "", "").order((A, S)) == (A, S)
    assert Measured({A: 1.11, S: 1.0}, "", "").order((A, S)) == (S, A)


def test_what_was_not_measured_comes_last_and_the_plain_form_only_where_it_was() -> None:
    assert Measured({S: 1.0}, "", "").order((A, S)) == (S, A)
    assert Measured({S: 2.0, DECOMPOSED: 1.0}, "", "").order((A, S)) == (DECOMPOSED, S, A)


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    ("form", "first"),
    [
        (sized(100), S),
        (sized(60), S),
        (sized(199), S),
        (sized(900), DECOMPOSED),
        (sized(400), None),  # an octave and more from both
        (sized(100, heads=2, kv_heads=2), None),  # two octaves less wide
        (sized(100, heads=12, kv_heads=12), S),
        (sized(100, mask="bool"), None),
        (sized(100, causal="upper-left"), None),
        (sized(100, dtype="float16"), None),
        (sized(100, cache=True), None),
        (sized(100, kv_heads=2), None),
        (sized("tokens"), None),
        (replace(Form(), query_tokens=1, key_tokens=100), None),
    ],
)
def test_the_nearest_size_decides_where_one_is_near(form: Form, first: str | None) -> None:
    found = nearest(CPU, form)
    assert (found.order((A, S, M))[0] if found else None) == first
    assert nearest("ort-cuda", form) is None


@pytest.mark.usefixtures("written")
def test_symbolic_sizes_are_those_that_are_usual() -> None:
    found = preference(CPU, sized("tokens"), (100, 100))
    assert found.ops[:2] == (S, M)
    assert found.why == (
        f"{S} 1 ms, {M} 1.05 ms, {A} 2 ms, decomposed 3 ms at 100 tokens, 8 heads of 64"
    )
    assert found.source == "here"
    assert preference(CPU, sized("tokens")).ops[0] == A


def test_the_shipped_table_is_whole() -> None:
    """Each row has every op that its runtime could be given, and says where it comes from."""
    assert {row["runtime"] for row in rows()} == sources().keys() >= {CPU}
    for row in rows():
        known = {kernel.op for kernel in KERNELS if kernel.runtime == row["runtime"]}
        assert row["ms"].keys() <= known | {DECOMPOSED}
        assert {S, M, DECOMPOSED} <= row["ms"].keys()
        assert all(ms > 0 for ms in row["ms"].values())
    sizes = {(row["heads"], row["head_size"], row["tokens"]) for row in rows()}
    assert len({tokens for *_, tokens in sizes}) >= 4
    assert {row["mask"] for row in rows()} == {"none", "dense", "causal"}
