"""Every named model through the main job: exported, proved, verified, accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_export.models.zoo import ZOO
from attn_export.pipeline import Options, export_and_verify
from attn_export.source import resolve

LEAST = {"top1": 0.97, "map50": 0.80, "exact-match": 0.99}


@pytest.mark.parametrize("name", ZOO)
def test_a_named_model_gives_pytorchs_answers(name: str, tmp_path: Path) -> None:
    outcome = export_and_verify(name, tmp_path / name, Options(), lambda _: None)
    for runtime in outcome.verification.runtimes.values():
        assert runtime.failures == []
    sizes = {case for case in outcome.verification.cases if "batch=1" in case or "batch=3" in case}
    assert len(sizes) >= 2 * len(outcome.bundle.components)
    for target in outcome.bundle.targets():
        assert target["total"] == target["recognised"] + sum(
            site["kind"] is None for site in target["sites"]
        )
        for site in target["sites"]:
            assert site["lowering"] or site["reason"]
    metric = outcome.bundle.manifest.get("metric")
    assert ZOO[name].trained == (metric is not None)
    if metric:
        assert metric["reference"] >= LEAST[metric["kind"]]
        assert outcome.verification.runtimes["ort-cpu"].metric == pytest.approx(
            metric["reference"], abs=1 / metric["samples"]
        )


@pytest.mark.parametrize("name", ZOO)
def test_the_listed_parameters_are_those_of_the_model(name: str) -> None:
    modules = [spec.module for spec in resolve(name).components.values()]
    unique = {id(p): p.numel() for module in modules for p in module.parameters()}
    assert sum(unique.values()) == ZOO[name].parameters
