"""What was measured on this machine decides later exports on it, where it is of the same sites."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from attn_export.attention.site import Site
from attn_export.capability import (
    CONTRIB_ATTENTION,
    DECOMPOSED,
    MULTI_HEAD_ATTENTION,
    STANDARD_ATTENTION,
    Form,
)
from attn_export.inspection import inspect_file
from attn_export.tuning import cache
from tests.file_graphs import attention

CPU = "ort-cpu"
NODE = ir.node("Attention", [])
SITE = Site("site", NODE, "self", 8, 8, 64, 64, "tokens", "tokens", "none", "none", 0.125, 0.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTN_EXPORT_CACHE", str(tmp_path / "own"))
    return tmp_path / "own" / "tune"


def key(form: Form = Form(), tokens: tuple[int, int] = (197, 197)) -> dict[str, object]:  # noqa: B008
    return cache.key_of(CPU, SITE, form, tokens)


def test_what_is_measured_is_found_again() -> None:
    path = cache.write(key(), {STANDARD_ATTENTION: 2.0, DECOMPOSED: 1.0})
    assert path.parent == cache.folder()
    found = cache.read(key())
    assert found is not None
    assert found.order((CONTRIB_ATTENTION, STANDARD_ATTENTION)) == (
        DECOMPOSED, STANDARD_ATTENTION, CONTRIB_ATTENTION
    )  # fmt: skip
    assert found.why == "decomposed 1 ms, ai.onnx.Attention 2 ms at 197 x 197 tokens"


@pytest.mark.parametrize(
    "other",
    [
        key(replace(Form(), head_size=32)),
        key(replace(Form(), mask="bool")),
        key(replace(Form(), key_tokens="context")),
        key(tokens=(197, 64)),
        {**key(), "version": "1.0"},
        {**key(), "machine": {"processor": "another"}},
        {**key(), "runtime": "openvino"},
    ],
)
def test_what_differs_in_anything_is_not(other: dict[str, object]) -> None:
    cache.write(key(), {STANDARD_ATTENTION: 1.0})
    assert cache.read(other) is None


def test_names_of_sizes_and_the_batch_do_not_matter() -> None:
    renamed = replace(Form(), query_tokens="length", key_tokens="length", batch=3)
    assert key(renamed) == key()


def order(rule: tuple[str, ...]) -> tuple[str, ...]:
    """Of what is kept for `key()`."""
    found = cache.read(key())
    assert found is not None
    return tuple(found.order(rule))


def test_ops_that_noise_does_not_tell_apart_keep_the_usual_order() -> None:
    ms = {STANDARD_ATTENTION: 1.0, CONTRIB_ATTENTION: 1.2, DECOMPOSED: 2.0}
    rule = (CONTRIB_ATTENTION, STANDARD_ATTENTION)
    cache.write(key(), ms, [STANDARD_ATTENTION, CONTRIB_ATTENTION])
    assert order(rule) == (*rule, DECOMPOSED)
    cache.write(key(), ms, [STANDARD_ATTENTION])
    assert order(rule)[0] == STANDARD_ATTENTION


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"ms": {}}', '{"key": 1, "ms": {"a": 1}, "clear": 2}']
)
def test_a_file_that_is_no_entry_is_said_and_left_out(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.write(key(), {STANDARD_ATTENTION: 1.0})
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "attn_export"):
        assert cache.read(key()) is None
    assert f"{path} is left out" in caplog.text


def test_the_user_chooses_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ATTN_EXPORT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "attn-export" / "tune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache" / "attn-export" / "tune"


def test_auto_takes_what_was_fastest_here_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = attention(tmp_path / "a.onnx")
    asked: list[dict[str, object]] = []
    original = cache.key_of

    def noted(*arguments: Any) -> dict[str, object]:
        asked.append(original(*arguments))
        return asked[-1]

    monkeypatch.setattr(cache, "key_of", noted)
    (before,) = inspect_file(file, "cpu", lambda _: None)["sites"]
    assert before["lowering"] == CONTRIB_ATTENTION
    cache.write(asked[0], {MULTI_HEAD_ATTENTION: 1.0, CONTRIB_ATTENTION: 2.0})
    (after,) = inspect_file(file, "cpu", lambda _: None)["sites"]
    assert after["lowering"] == MULTI_HEAD_ATTENTION
    assert "MultiHeadAttention 1 ms, com.microsoft.Attention 2 ms at " in after["reason"]
    cache.write(asked[0], {DECOMPOSED: 1.0, CONTRIB_ATTENTION: 2.0})
    (plain,) = inspect_file(file, "cpu", lambda _: None)["sites"]
    assert (plain["lowering"], plain["status"]) == (DECOMPOSED, "decomposed-by-choice")
    assert plain["reason"].startswith("decomposed 1 ms, com.microsoft.Attention 2 ms at ")
    assert json.loads(cache.path_of(asked[0]).read_text())["key"]["runtime"] == CPU
