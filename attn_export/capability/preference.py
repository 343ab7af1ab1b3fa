"""Which of the ops that are allowed is tried first, so that the fast kernels can run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_export.capability.form import Form
from attn_export.capability.kernels import (
    CONTRIB_ATTENTION,
    CPU,
    CUDA,
    DECOMPOSED,
    GROUP_QUERY_ATTENTION,
    MULTI_HEAD_ATTENTION,
    OPENVINO,
    STANDARD_ATTENTION,
    TENSORRT,
    WEB,
)
from attn_export.capability.measured import Measured, nearest

MEASURED_CPU = "64 to 1,024 tokens measured on 2 CPU cores with ONNX Runtime 1.31.1"
MEASURED_LONG = "4,096 tokens measured on 2 CPU cores with ONNX Runtime 1.31.1"
CUDA_SOURCES = "read in ONNX Runtime's CUDA sources"


@dataclass(frozen=True)
class Preference:
    """An order of ops for the forms that have some features.

    Attributes:
        when: features of `form.FEATURES` that must all hold.
        ops: the preferred one first.
        why: a clause about the first op.
    """

    runtime: str
    when: tuple[str, ...]
    ops: tuple[str, ...]
    why: str
    source: str


PACKED_FIRST = (
    CONTRIB_ATTENTION, MULTI_HEAD_ATTENTION, GROUP_QUERY_ATTENTION, STANDARD_ATTENTION
)  # fmt: skip

PREFERENCES = (
    Preference(
        CPU, ("2,048 keys or more", "not mask"),
        (MULTI_HEAD_ATTENTION, CONTRIB_ATTENTION, STANDARD_ATTENTION, GROUP_QUERY_ATTENTION),
        "its kernel keeps no matrix of scores: 181 ms and 41 MB against 229 ms and 1,064 MB",
        MEASURED_LONG),
    Preference(
        CPU, (),
        (CONTRIB_ATTENTION, STANDARD_ATTENTION, GROUP_QUERY_ATTENTION, MULTI_HEAD_ATTENTION),
        "projections and attention in one node are fastest, then the standard op on three",
        MEASURED_CPU),
    Preference(
        CUDA, ("cache",),
        (GROUP_QUERY_ATTENTION, MULTI_HEAD_ATTENTION, STANDARD_ATTENTION, CONTRIB_ATTENTION),
        "its cache is extended in place, the standard op copies it at each step", CUDA_SOURCES),
    Preference(
        CUDA, ("lengths", "opset 24", "not causal"),
        (STANDARD_ATTENTION, CONTRIB_ATTENTION, MULTI_HEAD_ATTENTION, GROUP_QUERY_ATTENTION),
        "it reaches Flash Attention with lengths", CUDA_SOURCES),
    Preference(
        CUDA, ("lengths",),
        (CONTRIB_ATTENTION, MULTI_HEAD_ATTENTION, STANDARD_ATTENTION, GROUP_QUERY_ATTENTION),
        "TensorRT's fused kernels take lengths, and no dense mask", CUDA_SOURCES),
    Preference(
        CUDA, ("dense mask",),
        (STANDARD_ATTENTION, MULTI_HEAD_ATTENTION, CONTRIB_ATTENTION, GROUP_QUERY_ATTENTION),
        "a dense mask leaves memory-efficient attention, which needs T % 4 == 0 in the standard op"
        " and S % 8 or S % 16 == 0 in the others", CUDA_SOURCES),
    Preference(CUDA, (), PACKED_FIRST,
               "every op reaches Flash Attention without a mask, and one product projects all",
               CUDA_SOURCES),
    Preference(TENSORRT, (), (DECOMPOSED,),
               "TensorRT fuses products and softmax itself, scale on Q, mask of 4 axes",
               "NVIDIA/TensorRT-RTX #26: both forms became _gemm_mha_v2"),
    Preference(OPENVINO, (), (STANDARD_ATTENTION, MULTI_HEAD_ATTENTION, CONTRIB_ATTENTION),
               "it is OpenVINO's own scaled dot-product attention", "run on OpenVINO 2026.4.1"),
    Preference(
        WEB, (),
        (STANDARD_ATTENTION, GROUP_QUERY_ATTENTION, MULTI_HEAD_ATTENTION, CONTRIB_ATTENTION),
        "no op was seen to be faster than another, and this one shares its weights with other"
        " targets",
        "64 to 4,096 tokens measured on a busy CPU with onnxruntime-web 1.30.0, one thread"),
)  # fmt: skip
"""For each runtime the most special first; the first whose features hold decides."""


FOLDS_ROTARY = (CUDA,)
"""Where GroupQueryAttention is to turn queries and keys itself: it saves two kernels a layer there.

On a CPU with ONNX Runtime 1.31.1 it took 0.8 to 1.1 of the time, within what readings differed.
"""


def preference(runtime: str, form: Form, tokens: tuple[int, int] | None = None) -> Preference:
    """The order in which ops are tried: what was measured at sizes like these, else the rule.

    Args:
        tokens: S and T that are usual, where those of the form are symbolic.
    """
    usual = form
    if tokens is not None:
        usual = replace(form, query_tokens=tokens[0], key_tokens=tokens[1])
    rule = next(
        row
        for row in PREFERENCES
        if row.runtime == runtime and all(usual.has(feature) for feature in row.when)
    )
    found = nearest(runtime, form, tokens)
    return rule if found is None else measured(rule, found)


def measured(rule: Preference, found: Measured) -> Preference:
    """The ops that were clearly faster than the rule's first one are tried before it."""
    ops = found.order(rule.ops)
    if ops == rule.ops:
        return rule
    return Preference(rule.runtime, rule.when, ops, found.why, found.source)


@dataclass(frozen=True)
class FastKernel:
    """A kernel of CUDA that an op reaches if nothing stands in its way.

    Attributes:
        blockers: features of which none may hold.
    """

    name: str
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    blockers: tuple[str, ...]
    source: str


BY_LENGTHS = (STANDARD_ATTENTION, GROUP_QUERY_ATTENTION)
WITHOUT_LENGTHS = (MULTI_HEAD_ATTENTION, CONTRIB_ATTENTION)
NOT_FLASH = (
    "dense mask", "head size no multiple of 8", "head size above 256",
    "values of another head size", "weights read",
)  # fmt: skip
NOT_EFFICIENT = ("head size no multiple of 8", "weights read")
FAST_KERNELS = (
    FastKernel("Flash Attention", BY_LENGTHS, ("float16", "bfloat16"), NOT_FLASH, CUDA_SOURCES),
    FastKernel("Flash Attention", WITHOUT_LENGTHS, ("float16", "bfloat16"),
               (*NOT_FLASH, "lengths"), CUDA_SOURCES),
    FastKernel("memory-efficient attention", BY_LENGTHS, ("float32", "float16", "bfloat16"),
               NOT_EFFICIENT, CUDA_SOURCES),
    FastKernel("memory-efficient attention", WITHOUT_LENGTHS, ("float32", "float16", "bfloat16"),
               (*NOT_EFFICIENT, "lengths"), CUDA_SOURCES),
    FastKernel("TensorRT's fused attention, before sm 9.0", WITHOUT_LENGTHS, ("float16",),
               (*NOT_FLASH, "causal", "cache"), CUDA_SOURCES),
)  # fmt: skip


def fast_kernels(op: str, form: Form) -> list[str]:
    """The fast CUDA kernels that `op` may reach with this form; which one runs, the GPU decides."""
    return [
        kernel.name
        for kernel in FAST_KERNELS
        if op in kernel.ops
        and form.dtype in kernel.dtypes
        and not any(form.has(feature) for feature in kernel.blockers)
    ]
