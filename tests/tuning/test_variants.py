"""What is made of the best graph, and what is not for lack of time."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from attn_export import bundle as bundles
from attn_export.capability.kernels import CPU
from attn_export.tuning.bases import from_file
from attn_export.tuning.lowerings import PACKED, SEPARATE
from attn_export.tuning.stage import Variant
from attn_export.tuning.variants import fusions


def test_the_projections_in_the_other_form_are_made_unless_there_is_no_time(
    digits_bundle: Path,
) -> None:
    bundle = bundles.read(digits_bundle)
    target = next(t for t in bundle.targets() if t["runtime"] == CPU)
    base = from_file(bundle, target, [{"batch": 2}])
    plan = {**target, "sites": [{**s, "lowering": "ai.onnx.Attention"} for s in target["sites"]]}
    best = Variant("best", CPU, ir.load(bundle.model_path(target)), {"sites": plan["sites"]})
    made, none = fusions(base, CPU, best)
    assert none == []
    assert {variant.name for variant in made} & {f"best, {PACKED}", f"best, {SEPARATE}"}
    rest, skipped = fusions(base, CPU, best, late=lambda: True)
    assert set(skipped) >= {f"best, {PACKED}"}
    assert {v.name for v in rest} == {v.name for v in made} - set(skipped)
