"""Which runtime "auto" takes, and what it says of the others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from attn_export import bundle as bundles
from attn_export import load
from attn_export.bench.machine import machine
from attn_export.bench.result import Benchmark, Timing
from attn_export.errors import RuntimeUnavailable, UsageError
from attn_export.production.choice import behind, order, reason
from attn_export.production.measured import medians, record
from tests.boundary import Cli

CPU, CUDA, TENSORRT, OPENVINO = "ort-cpu", "ort-cuda", "ort-tensorrt", "openvino"


def bundle(*targets: tuple[str, str, float | None]) -> bundles.Bundle:
    """Of (runtime, component, measured median) alone."""
    rows: list[dict[str, Any]] = [
        {"runtime": runtime, "component": component}
        | ({} if median is None else {"measured": {"median_ms": median}})
        for runtime, component, median in targets
    ]
    return bundles.Bundle(Path(), {"targets": rows})


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({}, [TENSORRT, CUDA, CPU, OPENVINO]),
        ({CPU: 3.0, OPENVINO: 2.0}, [TENSORRT, CUDA, OPENVINO, CPU]),
        ({CPU: 2.0, OPENVINO: 3.0}, [TENSORRT, CUDA, CPU, OPENVINO]),
        ({CPU: 1.0, CUDA: 4.0, TENSORRT: 2.0, OPENVINO: 3.0}, [CPU, TENSORRT, OPENVINO, CUDA]),
        ({CUDA: 2.0, TENSORRT: 4.0}, [CUDA, TENSORRT, CPU, OPENVINO]),
    ],
)
def test_measured_runtimes_are_in_the_order_of_their_medians(
    measured: dict[str, float], expected: list[str]
) -> None:
    rows = [(name, "model", measured.get(name)) for name in (CPU, OPENVINO, CUDA, TENSORRT)]
    assert order(bundle(*rows), ["model"]) == expected


def test_a_runtime_must_have_a_graph_of_every_component() -> None:
    made = bundle((CPU, "encoder", None), (CUDA, "encoder", None), (CPU, "decoder", None))
    assert order(made, ["encoder", "decoder"]) == [CPU]
    assert order(made, ["encoder"]) == [CUDA, CPU]


def test_medians_are_summed_over_the_components_that_all_share() -> None:
    made = bundle(
        (CPU, "encoder", 1.0), (CPU, "decoder", 1.0),
        (OPENVINO, "encoder", 3.0), (OPENVINO, "decoder", None),
    )  # fmt: skip
    assert medians(made, ["encoder", "decoder"]) == {CPU: 1.0, OPENVINO: 3.0}
    assert medians(made, ["decoder"]) == {CPU: 1.0}


def test_each_reason_says_what_was_measured_or_that_nothing_was() -> None:
    made = bundle((CPU, "model", 2.5), (OPENVINO, "model", 4.0), (CUDA, "model", None))
    made.manifest["targets"][0]["measured"]["machine"] = {"processor": "Some CPU"}
    assert reason(made, ["model"], CPU) == "measured at 2.5 ms on Some CPU"
    assert behind(made, ["model"], OPENVINO, CPU) == "measured at 4 ms"
    assert reason(made, ["model"], CUDA) == (
        "not measured, the first that works of ort-cuda, ort-cpu, openvino"
    )
    assert behind(made, ["model"], CPU, CUDA) == (
        "it comes after ort-cuda in the default order, and one of them was not measured"
    )
    assert reason(bundle((CPU, "model", None)), ["model"], CPU) == (
        "the only one that the bundle has a graph for"
    )


def test_a_better_runtime_that_does_not_work_here_is_told(
    lengths_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "attn_export"), load(lengths_bundle) as session:
        choice = session.choice
    assert choice.runtime == session.runtime == CPU
    assert choice.reason == "not measured, the first that works of ort-cuda, ort-cpu, openvino"
    assert choice.passed_over.keys() == {CUDA, OPENVINO}
    assert choice.passed_over[OPENVINO].startswith("it comes after ort-cpu in the default order")
    assert choice.passed_over[CUDA].startswith("ort-cuda is not available because ")
    warning, taken = caplog.records
    assert (warning.levelname, taken.levelname) == ("WARNING", "INFO")
    assert (
        warning.getMessage()
        == "build runs on ort-cpu, not on ort-cuda: " + (choice.passed_over[CUDA])
    )
    assert taken.getMessage() == f"build runs on {choice}"


def test_a_runtime_that_is_named_is_the_only_one_tried(
    lengths_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeUnavailable, match="ort-cuda is not available because"):
        load(lengths_bundle, CUDA)
    with load(lengths_bundle, CPU) as session:
        assert (session.choice.reason, session.choice.passed_over) == ("asked for", {})
    assert caplog.records == []


def only(path: Path, *runtimes: str) -> Path:
    """A bundle without the targets of other runtimes."""
    found = bundles.read(path)
    kept = [target for target in found.targets() if target["runtime"] in runtimes]
    return bundles.update(found, targets=kept).path


def test_where_no_runtime_works_each_is_told(bundle_copy: Path) -> None:
    found = bundles.read(bundle_copy)
    (target,) = found.targets()
    rows = [target | {"runtime": name} for name in (CUDA, TENSORRT)]
    bundles.update(found, targets=rows)
    with pytest.raises(RuntimeUnavailable) as raised:
        load(bundle_copy)
    told = str(raised.value)
    assert told.startswith("no runtime of the bundle works here: ort-tensorrt (")
    assert "), ort-cuda (" in told
    only(bundle_copy, CUDA)
    with pytest.raises(RuntimeUnavailable, match=r"^ort-cuda is not available because"):
        load(bundle_copy)


def test_a_bundle_for_other_places_alone_is_not_guessed_at(bundle_copy: Path) -> None:
    found = bundles.read(bundle_copy)
    bundles.update(found, targets=[target | {"runtime": "npu"} for target in found.targets()])
    with pytest.raises(UsageError, match="no runtime that 'auto' knows has a graph of model; name"):
        load(bundle_copy)


def timed(runtime: str, case: str, median: float | None) -> Benchmark:
    rounds = [] if median is None else [[median] * 100]
    timing = Timing(rounds, 10.0, 50.0, {}, () if median else ("differs",))
    return Benchmark({runtime: timing}, None, case, machine(2))


def test_what_was_timed_is_kept_in_the_manifest(bundle_copy: Path) -> None:
    found = bundles.read(bundle_copy)
    case = found.cases()[0].name
    made = record(found, timed(CPU, case, 1.25))
    (target,) = bundles.read(bundle_copy).targets()
    assert (target["measured"]["median_ms"], target["measured"]["runs"]) == (1.25, 100)
    assert target["measured"]["case"] == case
    assert target["measured"]["machine"]["cores"] >= 1
    assert "numpy" in target["measured"]["versions"]
    assert medians(made, ["model"]) == {CPU: 1.25}
    with load(bundle_copy) as session:
        assert session.choice.runtime == CPU


def test_a_runtime_whose_parity_failed_leaves_no_measurement(bundle_copy: Path) -> None:
    found = bundles.read(bundle_copy)
    made = record(found, timed(CPU, found.cases()[0].name, None))
    assert "measured" not in made.targets()[0]


def test_run_measures_and_keeps_it(cli: Cli, user_model: Path) -> None:
    ended = cli("run", f"{user_model}:build", "-o", "out", "--seconds", "0.3", "--json")
    assert ended.code == 0, ended.stderr
    bundle = bundles.read(user_model.parent / "out")
    (target,) = bundle.targets()
    assert target["measured"]["median_ms"] == ended.json["bench"]["runtimes"][CPU]["median_ms"]
    with load(bundle) as session:
        assert session.choice.reason == "the only one that the bundle has a graph for"
