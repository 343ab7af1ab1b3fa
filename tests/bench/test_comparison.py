"""Two benchmarks: slower beyond noise is 1, another machine or model is refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from attn_export.bench.comparison import compare, read
from attn_export.bench.machine import machine
from attn_export.errors import CheckFailed, FileError, UsageError
from tests.boundary import Cli


def found(
    median: float, *, spread: float = 0.01, ratio: float | None = None, **changes: Any
) -> dict[str, Any]:
    """A `bench --json` object of one runtime and, with a ratio, of torch."""
    row = {
        "median_ms": median,
        "median_low_ms": median * (1 - spread),
        "median_high_ms": median * (1 + spread),
        "batch": 1,
        "ratio_to_baseline": ratio,
        "ratio_low": None if ratio is None else ratio * (1 - spread),
        "ratio_high": None if ratio is None else ratio * (1 + spread),
    }
    rows = {"ort-cpu": row}
    if ratio is not None:
        rows["torch"] = {**row, "median_ms": median / ratio, "ratio_to_baseline": 1.0}
    return {
        "model": "m", "component": "model", "case": "batch=1", "runtimes": rows, "batches": {},
        "baseline": None if ratio is None else "torch",
        "machine": {**machine(2), "processor": "P"}, "versions": {"torch": "2.14.1"}, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("then", "now", "spread", "verdict"),
    [
        (10.0, 10.0, 0.01, "same"),
        (10.0, 12.0, 0.01, "slower"),
        (10.0, 10.6, 0.01, "same"),  # 1.06 in 1.04..1.08 may be the 5 % that are let go
        (10.0, 12.0, 0.10, "same"),  # 1.2 in 0.98..1.47 may be nothing
        (12.0, 10.0, 0.01, "faster"),
        (12.0, 10.0, 0.10, "same"),
    ],
)
def test_slower_is_what_noise_and_the_margin_do_not_explain(
    then: float, now: float, spread: float, verdict: str
) -> None:
    result = compare(found(then, spread=spread), found(now, spread=spread))
    (change,) = result.changes
    assert (change.of, change.verdict) == ("median_ms", verdict)
    assert change.ratio == now / then
    assert change.low == pytest.approx(now * (1 - spread) / (then * (1 + spread)))
    if verdict == "slower":
        with pytest.raises(CheckFailed, match=r"ort-cpu takes 1\.20 times as long"):
            result.require()
    else:
        result.require()


def test_a_slower_machine_is_taken_out_by_the_common_baseline() -> None:
    """Twice the time, and so does PyTorch: the ratio to it is what it was."""
    (change,) = compare(found(10.0, ratio=0.8), found(20.0, ratio=0.8)).changes
    assert (change.of, change.runtime, change.verdict) == ("ratio_to_baseline", "ort-cpu", "same")
    (worse,) = compare(found(10.0, ratio=0.8), found(10.0, ratio=1.0)).changes
    assert worse.verdict == "slower"


def test_another_pytorch_is_no_common_baseline() -> None:
    other = found(10.0, ratio=0.8, versions={"torch": "2.13.0"})
    result = compare(other, found(20.0, ratio=0.8))
    assert {change.of for change in result.changes} == {"median_ms"}
    assert result.notes == ("torch was 2.13.0 and is 2.14.1",)


def test_another_machine_is_refused_unless_asked_for() -> None:
    old = found(10.0, machine={**machine(2), "processor": "Q"})
    with pytest.raises(UsageError, match=r"another machine .processor was Q and is P"):
        compare(old, found(10.0))
    result = compare(old, found(10.0), other_machine=True)
    assert result.notes == ("another machine: processor was Q and is P",)


@pytest.mark.parametrize(("key", "value"), [("model", "other"), ("case", "batch=3")])
def test_another_model_or_case_is_refused(key: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"the {key} was '{value}'"):
        compare(found(10.0, **{key: value}), found(10.0))


def test_other_batches_and_runtimes_do_not_compare() -> None:
    old, new = found(10.0), found(10.0)
    old["runtimes"]["ort-cpu"]["batch"] = 8
    with pytest.raises(UsageError, match="no runtime in common"):
        compare(old, new)
    renamed = deepcopy(new)
    renamed["runtimes"]["openvino"] = renamed["runtimes"].pop("ort-cpu")
    with pytest.raises(UsageError, match="no runtime in common"):
        compare(renamed, new)


def test_each_common_batch_is_compared() -> None:
    old, new = found(10.0), found(10.0)
    old["batches"] = {"1": old["runtimes"], "4": found(20.0)["runtimes"]}
    new["batches"] = {"4": found(40.0)["runtimes"], "8": new["runtimes"]}
    (change,) = compare(old, new).changes
    assert (change.batch, change.ratio) == (4, 2.0)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"runtimes": 1}'])
def test_a_file_that_bench_did_not_write(tmp_path: Path, content: str) -> None:
    (tmp_path / "old.json").write_text(content)
    with pytest.raises(FileError, match="is not what bench --save writes"):
        read(tmp_path / "old.json")
    with pytest.raises(FileError, match="is not what bench --save writes"):
        read(tmp_path / "nothing.json")


def test_a_saved_benchmark_is_compared_with(cli: Cli, digits_bundle: Path, tmp_path: Path) -> None:
    """Once as it is, once as if it had been ten times faster then."""
    bench = ("bench", digits_bundle, "--runtime", "ort-cpu", "--seconds", "0.2")
    saved = tmp_path / "old.json"
    assert cli(*bench, "--save", saved).code == 0
    old = json.loads(saved.read_text())
    again = cli(*bench, "--save", saved)
    assert (again.code, "old.json exists" in again.sentence) == (2, True)
    same = cli(*bench, "--compare", saved, "--margin", "900", "--json")
    assert same.code == 0, same.stderr
    assert {c["runtime"] for c in same.json["compare"]["changes"]} == {"ort-cpu"}
    for rows in (old["runtimes"],):
        for key in ("median_ms", "median_low_ms", "median_high_ms", "ratio_to_baseline",
                    "ratio_low", "ratio_high"):  # fmt: skip
            rows["ort-cpu"][key] = (rows["ort-cpu"][key] or 1) / 1000
    saved.write_text(json.dumps(old))
    slower = cli(*bench, "--compare", saved, "-q")
    assert slower.code == 1
    assert "ort-cpu takes" in slower.sentence
    old["machine"]["cores"] = 1024
    saved.write_text(json.dumps(old))
    other = cli(*bench, "--compare", saved)
    assert (other.code, "cores was 1024" in other.sentence) == (2, True)
