"""What a tuned target asks of its runtime, and what a caller asks over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_export import bundle as bundles
from attn_export import load
from attn_export.bench.process import WorkerProcess
from attn_export.errors import FileError
from attn_export.production.choice import order, reason
from attn_export.runtimes.base import LoadOptions
from attn_export.runtimes.ort import OrtSession
from attn_export.runtimes.threads import cores
from attn_export.sessions import load as load_component
from attn_export.tuned import Settings, applied, settings_of, threads_of

SPINNING = "session.intra_op.allow_spinning"


def target(threads: int | None = None, **settings: Any) -> dict[str, Any]:
    tuned = {"settings": settings, "machine": {"threads": cores()}}
    if threads is not None:
        settings["threads"] = threads
    return {"name": "cpu", "tuned": tuned}


def test_what_is_not_tuned_leaves_everything_open() -> None:
    for tuned in (False, None, {}, {"settings": {}}):
        assert settings_of({"tuned": tuned}) == Settings()
    assert applied(LoadOptions(), {"tuned": False}) == LoadOptions()
    assert threads_of({"tuned": False}) is None


def test_settings_are_applied_where_the_caller_left_them_open() -> None:
    given = target(level="basic", without=["GeluFusionL2"], spinning=False)
    made = applied(LoadOptions(), given)
    assert (made.level, made.without, made.spinning) == ("basic", ("GeluFusionL2",), False)
    asked = LoadOptions(level="all", spinning=True)
    assert applied(asked, given).level == "all"
    assert applied(asked, given).spinning is True


def test_threads_hold_for_a_machine_with_as_many_cores() -> None:
    assert threads_of(target(1)) == 1
    other = target(1)
    other["tuned"]["machine"] = {"threads": cores() + 1}
    assert threads_of(other) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"level": "fastest"}, {"without": "GeluFusionL2"}, {"without": ["a b"]}, {"threads": 0},
        {"threads": True}, {"spinning": "no"}, {"provider": {"trt_engine_cache_path": "/"}},
        {"provider": {"prefer_nhwc": 1}}, {"unknown": 1}, [],
    ],
)  # fmt: skip
def test_settings_that_tune_does_not_write_are_refused(settings: Any) -> None:
    with pytest.raises(FileError, match="target 'cpu' has bad tuned settings"):
        settings_of({"name": "cpu", "tuned": {"settings": settings}})


@pytest.fixture
def tuned_bundle(bundle_copy: Path) -> Callable[..., bundles.Bundle]:
    def make(**settings: Any) -> bundles.Bundle:
        found = bundles.read(bundle_copy)
        (row,) = found.targets()
        tuned = {"settings": settings, "machine": {"threads": cores()}}
        return bundles.update(found, targets=[row | {"tuned": tuned}])

    return make


def options_of(session: OrtSession) -> Any:
    return session.inference_session.get_session_options()


def test_the_session_has_the_tuned_settings(tuned_bundle: Callable[..., bundles.Bundle]) -> None:
    found = tuned_bundle(level="basic", threads=1, spinning=False)
    with load_component(found, "ort-cpu") as session:
        assert isinstance(session, OrtSession)
        made = options_of(session)
        assert made.graph_optimization_level.name == "ORT_ENABLE_BASIC"
        assert made.intra_op_num_threads == 1
        assert made.get_session_config_entry(SPINNING) == "0"
    with load_component(found, "ort-cpu", threads=2) as session:
        assert isinstance(session, OrtSession)
        assert options_of(session).intra_op_num_threads == 2


def test_an_optimiser_is_left_out(
    tuned_bundle: Callable[..., bundles.Bundle], tmp_path: Path
) -> None:
    """What ran is in ONNX Runtime's profile: BiasGelu, or Add and Gelu."""
    for without in ([], ["BiasGeluFusion"]):
        found, folder = tuned_bundle(without=without), tmp_path / str(len(without))
        folder.mkdir()
        options = LoadOptions(trace=folder)
        with load_component(found, "ort-cpu", threads=1, options=options) as session:
            session.run(found.cases()[0].inputs)
        (profile,) = folder.iterdir()
        assert ("BiasGelu" in profile.read_text()) is not bool(without)


@pytest.mark.parametrize(
    ("settings", "asked", "entry"),
    [({}, None, "0"), ({"spinning": True}, None, "1"), ({"spinning": True}, False, "0")],
)
def test_threads_spin_in_production_where_that_was_faster(
    tuned_bundle: Callable[..., bundles.Bundle],
    settings: dict[str, Any],
    asked: bool | None,
    entry: str,
) -> None:
    with load(tuned_bundle(**settings), "ort-cpu", spinning=asked) as session:
        (one,) = session._sessions.values()
        assert isinstance(one, OrtSession)
        assert options_of(one).get_session_config_entry(SPINNING) == entry


def test_bench_times_what_is_deployed(tuned_bundle: Callable[..., bundles.Bundle]) -> None:
    """Settings that are refused show that the worker reads them."""
    found = tuned_bundle(level="fastest")
    arguments = [str(found.path), "ort-cpu", "model", "0", "batch=1"]
    with (
        WorkerProcess("ort-cpu", arguments) as worker,
        pytest.raises(FileError, match="bad tuned settings"),
    ):
        worker.ask("load")


def test_the_runtime_that_tune_found_fastest_comes_first() -> None:
    rows = [
        {"runtime": name, "component": "model", "measured": {"median_ms": ms}}
        for name, ms in (("ort-cpu", 2.0), ("openvino", 1.99))
    ]
    made = bundles.Bundle(Path(), {"targets": rows, "tuned": {"model": {"runtime": "ort-cpu"}}})
    assert order(made, ["model"]) == ["ort-cpu", "openvino"]
    assert reason(made, ["model"], "ort-cpu") == "measured at 2 ms, the fastest when it was tuned"
    for tuned in ({}, [], {"model": "openvino"}, {"model": {}}):
        made.manifest["tuned"] = tuned
        assert order(made, ["model"]) == ["openvino", "ort-cpu"]
