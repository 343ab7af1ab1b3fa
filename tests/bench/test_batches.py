"""Throughput over batch sizes: rows repeated, answers checked at each, fixed batches refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_export import benchmark
from attn_export import bundle as bundles
from attn_export.bench.batches import check_batches, with_batch
from attn_export.bench.result import require_parity
from attn_export.errors import CheckFailed, UsageError
from tests.boundary import Cli, edit_manifest


def test_rows_are_repeated_in_turn(digits_bundle: Path) -> None:
    bundle = bundles.read(digits_bundle)
    case = next(case for case in bundle.cases() if case.name == "batch=3")
    wide = with_batch(bundle, case, 7)
    for part in ("inputs", "outputs", "truth"):
        for name, array in getattr(wide, part).items():
            narrow = getattr(case, part)[name]
            assert array.shape == (7, *narrow.shape[1:])
            assert np.array_equal(array[5], narrow[2])
    assert with_batch(bundle, case, 2).inputs["image"].shape[0] == 2


def test_each_batch_is_checked_and_timed(digits_bundle: Path) -> None:
    result = benchmark(digits_bundle, ["ort-cpu"], baseline="ort-cpu", batches=[4, 1], seconds=0.3)
    shown = result.to_json()
    assert list(shown["batches"]) == ["4", "1"]
    assert shown["runtimes"] == shown["batches"]["4"]
    for batch, rows in shown["batches"].items():
        row = rows["ort-cpu"]
        assert (row["batch"], row["parity"]["passed"]) == (int(batch), True)
        assert row["rows_per_second"] == pytest.approx(int(batch) * 1e3 / row["median_ms"])
    four, one = (shown["batches"][b]["ort-cpu"] for b in ("4", "1"))
    assert four["product_gflop"] == pytest.approx(4 * one["product_gflop"])


def test_a_wrong_model_is_timed_at_no_batch(wrong_bundle: Path) -> None:
    result = benchmark(wrong_bundle, ["ort-cpu"], baseline="ort-cpu", batches=[2], seconds=0.1)
    assert result.to_json()["batches"]["2"]["ort-cpu"]["median_ms"] is None
    with pytest.raises(CheckFailed):
        require_parity(result)


def test_a_batch_that_the_model_does_not_take(bundle_copy: Path) -> None:
    bundle = bundles.read(bundle_copy)
    check_batches(bundle, "model", [1, 256])
    with pytest.raises(UsageError, match=r"a batch of 257 is outside of the declared 1\.\.256"):
        check_batches(bundle, "model", [4, 257])
    bundle.manifest["rows_mix"] = ["model"]
    with pytest.raises(UsageError, match="not a batch of independent rows"):
        check_batches(bundle, "model", [2])
    for entry in bundle.manifest["inputs"]:
        entry["shape"][0] = 2
    with pytest.raises(UsageError, match="the batch of 'model' is fixed"):
        check_batches(bundle, "model", [2])


@pytest.mark.parametrize("given", ["", "0", "1,two", "-4"])
def test_batches_that_are_none(cli: Cli, bundle_copy: Path, given: str) -> None:
    ended = cli("bench", bundle_copy, f"--batch={given}")
    assert (ended.code, f"--batch is '{given}'" in ended.sentence) == (2, True)


def test_a_fixed_batch_is_refused_before_anything_runs(cli: Cli, bundle_copy: Path) -> None:
    edit_manifest(bundle_copy, lambda m: [e["shape"].__setitem__(0, 2) for e in m["inputs"]])
    ended = cli("bench", bundle_copy, "--batch", "4")
    assert (ended.code, "is fixed" in ended.sentence) == (2, True)
