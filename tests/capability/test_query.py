"""The capability table answers with a reason and where it is known from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_export import capability
from attn_export.attention.reasons import Reason
from attn_export.capability import (
    CONTRIB_ATTENTION,
    FEATURES,
    GROUP_QUERY_ATTENTION,
    KERNELS,
    LIMITS,
    MULTI_HEAD_ATTENTION,
    REQUIREMENTS,
    STANDARD_ATTENTION,
    TARGETS,
    Form,
    blocked_row,
    fast_kernels,
    parse_version,
    preference,
    why_not,
)
from attn_export.capability.preference import FAST_KERNELS, PREFERENCES

PLAIN = Form()
CAUSAL = Form(causal="upper-left")
CROSS = Form(query_tokens="tokens", key_tokens="context", cross=True)
GROUPED = Form(heads=8, kv_heads=2)
ORT, TRT, OV = "1.31.1", "10.16.1.11", "2026.4.1"


def code(op: str, runtime: str, version: str, form: Form) -> str | None:
    refusal = why_not(op, runtime, version, form)
    return refusal.code if refusal else None


@pytest.mark.parametrize(("op", "runtime", "version", "form", "expected"), [
    (CONTRIB_ATTENTION, "ort-cpu", ORT, PLAIN, None),
    (CONTRIB_ATTENTION, "ort-cpu", ORT, CROSS, "projection"),
    (CONTRIB_ATTENTION, "ort-cpu", ORT, GROUPED, "heads"),
    (CONTRIB_ATTENTION, "ort-cpu", ORT, replace(PLAIN, dtype="float16"), "no-kernel"),
    (CONTRIB_ATTENTION, "ort-cuda", ORT, replace(PLAIN, dtype="bfloat16"), None),
    (CONTRIB_ATTENTION, "ort-tensorrt", TRT, PLAIN, "no-kernel"),
    (MULTI_HEAD_ATTENTION, "ort-cpu", ORT, replace(CAUSAL, query_tokens=3, key_tokens=5), "causal"),
    (MULTI_HEAD_ATTENTION, "ort-cpu", ORT, replace(CAUSAL, query_tokens=5, key_tokens=3), None),
    (MULTI_HEAD_ATTENTION, "ort-cpu", ORT, replace(CROSS, causal="upper-left"), "causal"),
    (MULTI_HEAD_ATTENTION, "openvino", OV, replace(CROSS, causal="upper-left"), None),
    (MULTI_HEAD_ATTENTION, "ort-cpu", ORT, replace(PLAIN, softcap=True), "softcap"),
    (GROUP_QUERY_ATTENTION, "ort-cpu", ORT, GROUPED, None),
    (GROUP_QUERY_ATTENTION, "ort-cpu", "1.29.0", GROUPED, "causal"),
    (GROUP_QUERY_ATTENTION, "ort-cpu", "1.29.0", replace(GROUPED, causal_mask=True), None),
    (GROUP_QUERY_ATTENTION, "ort-cpu", ORT, replace(GROUPED, head_size=12), "heads"),
    (GROUP_QUERY_ATTENTION, "ort-cpu", ORT, replace(GROUPED, kv_heads=3), "heads"),
    (GROUP_QUERY_ATTENTION, "ort-cuda", ORT, GROUPED, "no-kernel"),
    (GROUP_QUERY_ATTENTION, "ort-cuda", ORT, replace(GROUPED, dtype="float16"), None),
    (GROUP_QUERY_ATTENTION, "ort-cpu", ORT, replace(CAUSAL, cache=True), "cache"),
    (GROUP_QUERY_ATTENTION, "ort-cpu", ORT, replace(CAUSAL, cache=True, query_tokens=1,
                                                    key_tokens=1), None),
    (GROUP_QUERY_ATTENTION, "openvino", OV, replace(CAUSAL, batch=1), "cache"),
    (STANDARD_ATTENTION, "ort-cpu", ORT, replace(GROUPED, mask="bool", softcap=True), None),
    (STANDARD_ATTENTION, "ort-cpu", "1.22.1", PLAIN, "no-kernel"),
    (STANDARD_ATTENTION, "ort-cpu", "1.26.0", replace(PLAIN, mask="bool", softcap=True), "softcap"),
    (STANDARD_ATTENTION, "ort-cpu", "1.27.0", replace(PLAIN, mask="bool", softcap=True), None),
    (STANDARD_ATTENTION, "ort-cpu", "1.27.0", replace(PLAIN, mask="bool", blocked_rows=True),
     "blocked-rows"),
    (STANDARD_ATTENTION, "ort-cpu", ORT, replace(PLAIN, window=True), "window"),
    (STANDARD_ATTENTION, "ort-cpu", ORT, replace(PLAIN, opset=25), "no-kernel"),
    (STANDARD_ATTENTION, "ort-cpu", "1.24.4", replace(PLAIN, opset=24), "no-kernel"),
    (STANDARD_ATTENTION, "ort-cpu", ORT, replace(PLAIN, dtype="float64"), "no-kernel"),
    (STANDARD_ATTENTION, "ort-cpu", ORT, replace(PLAIN, mask="lengths"), "mask"),
    (STANDARD_ATTENTION, "ort-cuda", "1.24.4", PLAIN, "no-kernel"),
    (STANDARD_ATTENTION, "ort-cuda", ORT, PLAIN, None),
    (STANDARD_ATTENTION, "ort-tensorrt", "10.13.0", PLAIN, "no-kernel"),
    (STANDARD_ATTENTION, "ort-tensorrt", TRT, PLAIN, None),
    (STANDARD_ATTENTION, "ort-tensorrt", TRT, replace(PLAIN, cache=True), "cache"),
    (STANDARD_ATTENTION, "ort-tensorrt", TRT, replace(PLAIN, softcap=True), "softcap"),
    ("decomposed", "ort-tensorrt", TRT, replace(GROUPED, window=True), None),
])  # fmt: skip
def test_an_op_is_allowed_or_refused_with_a_code(
    op: str, runtime: str, version: str, form: Form, expected: str | None
) -> None:
    assert code(op, runtime, version, form) == expected


def test_a_refusal_says_what_and_where_it_is_known_from() -> None:
    refusal = why_not(STANDARD_ATTENTION, "ort-cpu", "1.22.1", PLAIN)
    assert str(refusal) == (
        "ai.onnx.Attention needs ONNX Runtime 1.23, this is 1.22.1 (run on ONNX Runtime 1.23 to"
        " 1.32)"
    )


def test_the_table_is_sound() -> None:
    """Codes are of the closed list, conditions are features, ops and runtimes are known."""
    assert {limit.code for limit in LIMITS} <= set(map(str, Reason))
    conditions = [word for row in (*LIMITS, *PREFERENCES) for word in row.when]
    conditions += [word for kernel in FAST_KERNELS for word in kernel.blockers]
    assert {word.removeprefix("not ") for word in conditions} <= FEATURES.keys()
    runtimes = set(capability.RUNTIMES)
    assert {kernel.runtime for kernel in KERNELS} == runtimes
    assert {target.runtime for target in TARGETS.values()} == runtimes
    assert {runtime for row in (*LIMITS, *REQUIREMENTS) for runtime in row.runtimes} <= runtimes
    keys = [(kernel.op, kernel.runtime) for kernel in KERNELS]
    assert len(keys) == len(set(keys))
    assert all(row.source for row in (*KERNELS, *LIMITS, *REQUIREMENTS, *PREFERENCES))


def test_every_runtime_has_an_order_for_every_form() -> None:
    for target in TARGETS.values():
        for form in (PLAIN, replace(PLAIN, mask="bool"), replace(CAUSAL, cache=True)):
            assert preference(target.runtime, form).ops


def test_the_order_on_cuda_keeps_the_fast_kernels() -> None:
    assert preference("ort-cuda", PLAIN).ops[0] == CONTRIB_ATTENTION
    assert preference("ort-cuda", replace(PLAIN, mask="bool")).ops[0] == STANDARD_ATTENTION
    assert preference("ort-cuda", replace(CAUSAL, cache=True)).ops[0] == GROUP_QUERY_ATTENTION
    lengths = replace(PLAIN, mask="lengths")
    assert preference("ort-cuda", lengths).ops[0] == CONTRIB_ATTENTION
    assert preference("ort-cuda", replace(lengths, opset=24)).ops[0] == STANDARD_ATTENTION
    assert preference("ort-tensorrt", PLAIN).ops == ("decomposed",)


def test_flash_attention_takes_no_dense_mask_and_no_odd_head() -> None:
    half = replace(PLAIN, dtype="float16")
    both = ["Flash Attention", "memory-efficient attention"]
    assert fast_kernels(STANDARD_ATTENTION, half) == both
    assert fast_kernels(STANDARD_ATTENTION, replace(half, mask="bool")) == both[1:]
    assert fast_kernels(STANDARD_ATTENTION, replace(half, head_size=512)) == both[1:]
    assert fast_kernels(STANDARD_ATTENTION, replace(half, mask="lengths")) == both
    fused = ["TensorRT's fused attention, before sm 9.0"]
    assert fast_kernels(MULTI_HEAD_ATTENTION, replace(half, mask="lengths")) == fused
    assert fast_kernels(MULTI_HEAD_ATTENTION, half) == both + fused
    assert fast_kernels(STANDARD_ATTENTION, PLAIN) == both[1:]
    assert fast_kernels(STANDARD_ATTENTION, replace(half, head_size=20)) == []


@pytest.mark.parametrize(("version", "answer"), [
    ("1.23.0", "nan"), ("1.24.4", "mean"), ("1.27.9", "mean"), ("1.28.0", "zero"), (ORT, "zero"),
])  # fmt: skip
def test_blocked_rows_depend_on_the_version(version: str, answer: str) -> None:
    assert blocked_row(STANDARD_ATTENTION, "ort-cpu", version, "bool") == answer


def test_what_nobody_looked_at_is_unknown() -> None:
    assert blocked_row(MULTI_HEAD_ATTENTION, "ort-cuda", ORT, "-inf") == "unknown"


@pytest.mark.parametrize(("text", "number"), [
    ("1.31.1", (1, 31, 1)), ("10.16.1.11", (10, 16, 1, 11)), ("1.32.0.dev20261101", (1, 32, 0)),
    ("2026.4.1-21000-abc", (2026, 4, 1)), ("1.28", (1, 28)),
])  # fmt: skip
def test_versions_of_every_style_are_read(text: str, number: tuple[int, ...]) -> None:
    assert parse_version(text) == number


def test_text_that_is_no_version_is_an_error() -> None:
    with pytest.raises(ValueError, match="no version"):
        parse_version("unknown")
