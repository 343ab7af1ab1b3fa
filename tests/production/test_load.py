"""`attn_export.load`: a bundle opens, answers as PyTorch did, and closes."""

from __future__ import annotations

import copy
import gc
import shutil
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attn_export import bundle as bundles
from attn_export import load
from attn_export.errors import (
    CheckFailed,
    FileError,
    InputError,
    UsageError,
)
from attn_export.production.loading import Options
from attn_export.production.session import BundleSession


def tokens(batch: int = 2, length: int = 5, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {"tokens": generator.standard_normal((batch, length, 16)).astype(np.float32)}


def test_a_session_gives_pytorchs_stored_answers(
    session: BundleSession, lengths_bundle: Path
) -> None:
    cases = bundles.read(lengths_bundle).cases()
    assert {case.inputs["tokens"].shape[:2] for case in cases} >= {(1, 3), (2, 5)}
    for case in cases:
        (name,) = case.outputs
        made = session.run(case.inputs)
        assert np.abs(made[name] - case.outputs[name]).max() <= case.allowed[name]["all"]


def test_what_is_open_tells_its_name_runtime_components_and_inputs(session: BundleSession) -> None:
    assert (session.runtime, session.components) == ("ort-cpu", ("model",))
    (spec,) = session.inputs()
    assert (spec.name, spec.dtype, spec.shape) == ("tokens", "float32", ("batch", "length", 16))
    assert session.placement().keys() == {"CPUExecutionProvider"}


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([1.0], "the inputs are a list; give a dict of arrays by name."),
        ({}, "input 'tokens' is missing; give all of tokens."),
        ({"token": tokens()["tokens"]},
         "the model has no input 'token'; its inputs are tokens."),
        ({"tokens": [[0.0]]}, "input 'tokens' is a list; give a numpy array."),
        ({"tokens": np.ma.masked_array(tokens()["tokens"])},
         "input 'tokens' is a masked array; fill it first."),
        ({"tokens": tokens()["tokens"].astype(np.float64)},
         "input 'tokens' is float64, the model takes float32; convert it first."),
        ({"tokens": tokens()["tokens"].astype(">f4")},
         "input 'tokens' is >f4, the model takes float32; convert it first."),
        ({"tokens": np.array([None])},
         "input 'tokens' is object, the model takes float32; convert it first."),
        ({"tokens": tokens()["tokens"][0]},
         "input 'tokens' has shape (5, 16), the model takes (batch, length, 16); give it 3 axes."),
        (tokens(length=2),
         "'length' is 2 in input 'tokens', the model takes 3 to 64; split the request, or export"
         " with a wider --dynamic range."),
        (tokens(length=65),
         "'length' is 65 in input 'tokens', the model takes 3 to 64; split the request, or export"
         " with a wider --dynamic range."),
        (tokens(batch=0),
         "'batch' is 0 in input 'tokens', the model takes 1 to 8; split the request, or export"
         " with a wider --dynamic range."),
    ],
)  # fmt: skip
def test_what_the_bundle_does_not_take_is_refused_before_the_runtime(
    session: BundleSession, inputs: Any, sentence: str
) -> None:
    with pytest.raises(InputError) as raised:
        session.run(inputs)
    assert str(raised.value) == sentence


def test_views_of_any_layout_give_the_same_answer(session: BundleSession) -> None:
    array = tokens(2, 6)["tokens"]
    expected = session.run({"tokens": array})
    column_major, reversed_twice = np.asfortranarray(array), array[::-1].copy()[::-1]
    frozen = array.copy()
    frozen.flags.writeable = False
    for view in (column_major, reversed_twice, frozen):
        assert all(
            np.array_equal(made, expected[name])
            for name, made in session.run({"tokens": view}).items()
        )


def test_a_tensor_with_dlpack_needs_no_conversion(session: BundleSession) -> None:
    array = tokens()["tokens"]
    (made,), (expected,) = (
        session.run({"tokens": value}).values() for value in (torch.from_numpy(array), array)
    )
    assert np.array_equal(made, expected)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, 3, 16, requires_grad=True),
        torch.zeros(1, 3, 16, dtype=torch.bfloat16),
        torch.zeros(1, 3, 16, device="meta"),
    ],
    ids=["requires_grad", "bfloat16", "elsewhere"],
)
def test_a_tensor_that_numpy_cannot_read_is_refused(
    session: BundleSession, tensor: torch.Tensor
) -> None:
    with pytest.raises(InputError, match="input 'tokens' is a Tensor that numpy cannot read"):
        session.run({"tokens": tensor})


def test_a_closed_session_refuses_with_a_sentence(lengths_bundle: Path) -> None:
    with load(lengths_bundle, "ort-cpu") as opened:
        opened.run(tokens())
    assert repr(opened) == "<BundleSession build: model on ort-cpu, closed>"
    calls: list[Callable[[], object]] = [
        lambda: opened.run(tokens()), opened.warmup, opened.verify, opened.placement,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError) as raised:
            call()
        assert str(raised.value) == "this session is closed; load the bundle again."
    opened.close()


def test_runs_in_flight_end_well_when_another_thread_closes(lengths_bundle: Path) -> None:
    opened, inputs = load(lengths_bundle, "ort-cpu", threads=1), tokens(8, 64)
    expected, ended = opened.run(inputs), []
    running = threading.Barrier(5)

    def loop() -> None:
        running.wait()
        try:
            while True:
                made = opened.run(inputs)
                assert all(np.array_equal(made[name], expected[name]) for name in expected)
        except Exception as error:
            ended.append(str(error))

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    running.wait()
    opened.close()
    for thread in threads:
        thread.join(timeout=20)
    assert ended == ["this session is closed; load the bundle again."] * 4


def run_forever(opened: BundleSession, inputs: dict[str, np.ndarray]) -> None:
    while True:
        opened.run(inputs)


def test_a_signal_handler_may_close_a_session_that_its_thread_runs(lengths_bundle: Path) -> None:
    opened, inputs = load(lengths_bundle, "ort-cpu", threads=1), tokens(8, 64)
    before = signal.signal(signal.SIGALRM, lambda *_: opened.close())
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(UsageError, match="this session is closed"):
            run_forever(opened, inputs)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_session_that_nobody_has_is_freed_at_once(lengths_bundle: Path) -> None:
    opened = load(lengths_bundle, "ort-cpu")
    seen = weakref.ref(opened)
    gc.disable()
    try:
        del opened
        assert seen() is None
    finally:
        gc.enable()


def test_verify_compares_with_pytorchs_answers(
    session: BundleSession, lengths_bundle: Path
) -> None:
    result = session.verify()
    assert (result.passed, result.runtime) == (True, "ort-cpu")
    assert {label for label, _ in result.comparisons} >= {
        case.name for case in bundles.read(lengths_bundle).cases()
    }


def test_verify_at_loading_refuses_a_bundle_whose_weights_are_wrong(wrong_bundle: Path) -> None:
    load(wrong_bundle).close()
    with pytest.raises(CheckFailed, match="ort-cpu differs from PyTorch here, batch=1: output"):
        load(wrong_bundle, verify=True)


def test_warmup_runs_every_component(decoder_bundle: Path) -> None:
    with load(decoder_bundle, warmup=True) as opened:
        assert opened.components == ("prefill", "decode")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"runtime": "tpu"}, "there is no runtime 'tpu'; the runtimes are"),
        ({"component": "decode"},
         "the bundle has no component 'decode'; its components are model."),
        ({"threads": 0}, "threads is 0; give 1 or more, or leave it out."),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_sentence(
    lengths_bundle: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as raised:
        load(lengths_bundle, **options)
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(("spinning", "entry"), [(False, "0"), (True, "1")])
def test_idle_threads_spin_only_where_that_is_asked_for(
    lengths_bundle: Path, spinning: bool, entry: str
) -> None:
    with load(lengths_bundle, "ort-cpu", spinning=spinning) as opened:
        options = opened._sessions["model"].inference_session.get_session_options()
        key = "session.intra_op.allow_spinning"
        assert options.get_session_config_entry(key) == entry


def test_runtimes_are_told_the_ranges_the_cache_and_whether_they_may_fall_back(
    lengths_bundle: Path, tmp_path: Path
) -> None:
    options = Options(None, None, True, False, tmp_path, False).of(
        bundles.read(lengths_bundle), "ort-cpu", "model"
    )
    assert options.ranges == {"batch": (1, 8), "length": (3, 64)}
    assert (options.cache, options.allow_fallback) == (tmp_path, True)


def test_one_component_opens_alone_and_others_must_be_named(decoder_bundle: Path) -> None:
    ids = np.full((1, 4), 5, np.int64)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    with load(decoder_bundle) as whole, load(decoder_bundle, component="prefill") as alone:
        with pytest.raises(UsageError, match="several components are open: prefill, decode; name"):
            whole.run(inputs)
        with pytest.raises(UsageError, match="no component 'decode' is open; those that are: pre"):
            alone.run(inputs, "decode")
        made = whole.run(inputs, component="prefill")
        for name, array in alone.run(inputs).items():
            assert np.array_equal(array, made[name])


def test_a_copy_opens_the_bundle_again(session: BundleSession) -> None:
    with copy.deepcopy(session) as other:
        (made,), (expected,) = (s.run(tokens()).values() for s in (other, session))
        assert np.array_equal(made, expected)
    session.run(tokens())


def test_reopening_a_bundle_that_has_changed_is_refused(
    digits_bundle: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(digits_bundle, tmp_path / "served"))
    with load(path) as opened:
        bundles.update(bundles.read(path), note="another one")
        with pytest.raises(FileError, match="has changed since the session was opened; load the"):
            opened.reopen()


def test_a_damaged_bundle_does_not_open(bundle_copy: Path) -> None:
    (bundle_copy / bundles.WEIGHTS).unlink()
    with pytest.raises(FileError, match=r"weights.data is missing; copy the whole bundle again"):
        load(bundle_copy)
    with pytest.raises(FileError, match="is not a bundle"):
        load(bundle_copy.parent)
