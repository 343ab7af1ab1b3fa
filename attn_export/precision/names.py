"""The precisions, what is built for which target, and what targets and runtimes are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from attn_export.capability.kernels import CONTRIB_ATTENTION
from attn_export.errors import UsageError

Precision = Literal["fp32", "fp16", "bf16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8")
DTYPES: dict[str, str] = {"fp16": "float16", "bf16": "bfloat16"}
"""Precision -> the dtype, as numpy names it, that attention is computed in; others: float32."""

BUILT: dict[str, tuple[Precision, ...]] = {
    "cpu": ("fp32", "fp16", "int8"),
    "cuda": PRECISIONS,
    "tensorrt": PRECISIONS,
    "openvino": ("fp32", "int8"),
}
WHY_NOT = {
    ("cpu", "bf16"): (
        "ONNX Runtime's CPU provider has no bfloat16 kernels",
        "choose fp16, or bf16 for target cuda or tensorrt",
    ),
    ("openvino", "fp16"): (
        "OpenVINO chooses the precision that it computes in itself",
        "export fp32 and set OpenVINO's INFERENCE_PRECISION_HINT",
    ),
}


class LoweringOptions(TypedDict):
    """What `attention.lowering.lower` must know of a precision."""

    dtype: str | None
    without: tuple[str, ...]


def lowering_options(precision: str) -> LoweringOptions:
    """The dtype that ops need kernels for. int8 leaves out the op that holds its projections, which
    are products to be quantised."""
    return LoweringOptions(
        dtype=DTYPES.get(precision), without=(CONTRIB_ATTENTION,) if precision == "int8" else ()
    )


def parse_precisions(text: str) -> tuple[Precision, ...]:
    """`fp32,fp16` as ("fp32", "fp16").

    Raises:
        UsageError: none, or one that is not built.
    """
    found: list[Precision] = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        known = next((precision for precision in PRECISIONS if precision == name), None)
        if known is None:
            raise UsageError(
                f"precision {name} is not built", f"choose from {', '.join(PRECISIONS)}"
            )
        if known not in found:
            found.append(known)
    if not found:
        raise UsageError("no precision is named", f"choose from {', '.join(PRECISIONS)}")
    return tuple(found)


def check_target(target: str, precision: Precision) -> None:
    """Raise UsageError for a precision that is not built for a target."""
    if precision in BUILT.get(target, ("fp32",)):
        return
    built = ", ".join(BUILT.get(target, ("fp32",)))
    default = (f"target {target} is not built in {precision}", f"choose from {built}")
    raise UsageError(*WHY_NOT.get((target, precision), default))


def target_name(target: str, precision: str) -> str:
    """`cuda` for fp32, `cuda-fp16` and so on for the others."""
    return target if precision == "fp32" else f"{target}-{precision}"


def rows_of(
    targets: Sequence[dict[str, Any]], name: str, precision: str | None
) -> list[dict[str, Any]]:
    """The targets that `cpu` names: those of that precision, else fp32's, else the first one's."""
    exact = [row for row in targets if row["name"] == target_name(name, precision or "fp32")]
    if exact or precision is not None:
        return exact
    others = [row for row in targets if row["name"] in {f"{name}-{p}" for p in PRECISIONS}]
    return [row for row in others if row["name"] == others[0]["name"]]


def split_label(label: str) -> tuple[str, str | None]:
    """`ort-cpu-fp16` as ("ort-cpu", "fp16"); a runtime alone leaves the precision open."""
    runtime, _, precision = label.rpartition("-")
    return (runtime, precision) if runtime and precision in PRECISIONS else (label, None)
