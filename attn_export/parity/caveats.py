"""What a model's own answers depend on, and its owner should know before trusting a comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attn_export.models.spec import ExportSpec
from attn_export.parity.eager import run
from attn_export.parity.tolerance import Array
from attn_export.reference import Case

CLEAR = 100.0  # times the allowed error: rounding never gets there, another answer does


def fast_path_note(spec: ExportSpec, cases: Sequence[Case]) -> str:
    """Whether PyTorch's fused inference path answers differently from the layers it stands for.

    The bundle gives the layers' answers. Empty where the two agree.
    """
    for case in cases:
        fast = run(spec, spec.module, _tensors(spec, case), fast=True)
        for name, array in fast.items():
            difference = _difference(array, case.outputs[name])
            if difference > CLEAR * max(case.allowed[name].values()):
                return (
                    f"PyTorch's fast path (nn.TransformerEncoder, nn.MultiheadAttention in eval"
                    f" mode) differs from the layers' own answers by {difference:.3g} in '{name}'"
                    f" on case {case.name}, as it does on padded positions; the bundle gives the"
                    " layers' answers, those of torch.backends.mha.set_fastpath_enabled(False)"
                )
    return ""


def rows_mix(spec: ExportSpec, cases: Sequence[Case]) -> bool:
    """Whether a row of the batch differs, in PyTorch itself, from that row run alone.

    So it is where axis 0 is no batch (sequence-first layouts) or attention runs across it.
    """
    axes = spec.axes()
    for case in cases:
        inputs = _tensors(spec, case)
        sizes = {value.shape[0] for value in inputs.values() if value.dim()}
        batched = all(axes.get(n, {}).get(0) and axes[n][0].name == "batch" for n in case.inputs)
        if not batched or len(sizes) != 1 or (size := sizes.pop()) < 2:
            continue
        if any(array.ndim == 0 or array.shape[0] != size for array in case.outputs.values()):
            return False
        alone = run(spec, spec.module, {name: value[:1] for name, value in inputs.items()})
        return any(
            array.shape != case.outputs[name][:1].shape
            or _difference(array, case.outputs[name][:1]) > CLEAR * max(case.allowed[name].values())
            for name, array in alone.items()
            if array.dtype.kind == "f"
        )
    return False


def _tensors(spec: ExportSpec, case: Case) -> dict[str, Tensor]:
    return {spec.parameter(name): torch.tensor(array) for name, array in case.inputs.items()}


def _difference(a: Array, b: Array) -> float:
    """Largest absolute difference; infinity where one is NaN and the other is not."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape or (np.isnan(x) != np.isnan(y)).any():
        return float("inf")
    with np.errstate(invalid="ignore"):
        return float(np.nanmax(np.abs(x - y), initial=0.0))
