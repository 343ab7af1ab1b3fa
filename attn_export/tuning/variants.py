"""What else is measured of a graph once its ops are chosen: fusions, optimisation, threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from attn_export.attention.lower import contrib_attention
from attn_export.capability.kernels import CPU, CUDA
from attn_export.runtimes.threads import cores
from attn_export.tuned import Settings
from attn_export.tuning.bases import Base
from attn_export.tuning.lowerings import PACKED, SEPARATE, lowered, planned
from attn_export.tuning.skip_layer_norm import fuse_skip_layer_norm
from attn_export.tuning.stage import Variant

PLAIN = "plain export"


def fusions(
    base: Base, runtime: str, best: Variant, late: Callable[[], bool] = lambda: False
) -> tuple[list[Variant], list[str]]:
    """The best graph with more fused, and with its projections in the other form.

    Args:
        late: whether there is no time to lower the graph once more.

    Returns:
        the variants, and the names of those that there was no time for.
    """
    variants, skipped = [], []
    fused = best.model.clone()
    if runtime in (CPU, CUDA) and (count := fuse_skip_layer_norm(fused, base.sizes)):
        account = {**best.account}
        how = f"{count} com.microsoft.SkipLayerNormalization"
        variants.append(
            Variant(f"{best.name}, sums fused", runtime, fused, account, best.settings, how)
        )
    ops = {str(s["name"]): s.get("lowering") for s in best.account["sites"]}
    plan = {name: op for name, op in ops.items() if isinstance(op, str)}
    if plan and contrib_attention.NAME not in plan.values():
        for form in (PACKED,) if base.merged else (PACKED, SEPARATE):
            if late():
                skipped.append(f"{best.name}, {form}")
                continue
            made = lowered(base, runtime, planned(runtime, plan), projections=form)
            if _products(made.model) != _products(best.model):
                variants.append(made.variant(runtime, f"{best.name}, {form}", form))
    return variants, skipped


def _products(model: ir.Model) -> int:
    return sum(node.op_type in ("MatMul", "Gemm", "Split") for node in model.graph)


def levels(runtime: str, best: Variant) -> list[Variant]:
    """What ONNX Runtime makes of the graph before it runs it."""
    if not runtime.startswith("ort-"):
        return []
    ops = Counter(node.op_type for node in best.model.graph)
    found = [Settings(level="extended"), Settings(level="basic")]
    if ops["Gelu"] and ops["Add"]:
        found.append(Settings(without=("BiasGeluFusion",)))
    if ops["LayerNormalization"] and ops["Add"]:
        found.append(Settings(without=("SkipLayerNormFusion",)))
    if runtime == CUDA and ops["Conv"]:
        found.append(Settings(provider={"prefer_nhwc": "1"}))
    return [_also(best, settings) for settings in found]


def threads(runtime: str, best: Variant) -> list[Variant]:
    if runtime.startswith("ort-") and runtime != CPU:
        return []
    most = cores()
    counts = sorted({max(1, most // 2), 1} - {most}, reverse=True)
    variants = [_also(best, Settings(threads=count)) for count in counts]
    if runtime == CPU and most > 1:
        variants.append(_also(best, Settings(spinning=False)))
    return variants


def _also(best: Variant, added: Settings) -> Variant:
    """The best one with one more setting."""
    without = (*best.settings.without, *added.without)
    merged = Settings(**{**vars(best.settings), **_given(added), "without": without})
    name = str(added)
    return best.with_settings(name if best.name == PLAIN else f"{best.name}, {name}", merged)


def _given(settings: Settings) -> dict[str, Any]:
    return {key: value for key, value in vars(settings).items() if value not in ("", (), {}, None)}
