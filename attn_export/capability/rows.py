"""What an op answers for a query whose mask allows no key.

PyTorch's scaled_dot_product_attention gives 0 where the row is False or -inf, and the mean of the
values where it is the most negative number of the dtype, since that only adds to the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_export.capability.form import Version, parse_version
from attn_export.capability.kernels import (
    CONTRIB_ATTENTION,
    CPU,
    CUDA,
    MULTI_HEAD_ATTENTION,
    OPENVINO,
    RAN,
    STANDARD_ATTENTION,
    WEB,
    WEB_RAN,
)

Blocked = Literal["bool", "-inf", "lowest", "lengths"]
Answer = Literal["zero", "mean", "nan", "plain", "unknown"]
"""plain: softmax as if nothing were blocked."""

PYTORCH: dict[Blocked, Answer] = {"bool": "zero", "-inf": "zero", "lowest": "mean"}


@dataclass(frozen=True)
class BlockedRow:
    """An op's answer on one runtime for one way to block a row.

    Attributes:
        since, before: the versions of which it holds.
    """

    op: str
    runtime: str
    blocked: Blocked
    answer: Answer
    source: str
    since: Version = (0,)
    before: Version | None = None


ATTENTION_RUN = "run on ONNX Runtime 1.23 to 1.32"
ZEROED = "ZeroFullyMaskedRows, read in ONNX Runtime's CUDA sources"
OPENVINO_RUN = "run on OpenVINO 2026.4.1"
NEW: Version = (1, 28)

BLOCKED_ROWS = (
    BlockedRow(STANDARD_ATTENTION, CPU, "bool", "nan", ATTENTION_RUN, before=(1, 24)),
    BlockedRow(STANDARD_ATTENTION, CPU, "bool", "mean", ATTENTION_RUN, (1, 24), NEW),
    BlockedRow(STANDARD_ATTENTION, CPU, "bool", "zero", ATTENTION_RUN, NEW),
    BlockedRow(STANDARD_ATTENTION, CPU, "-inf", "nan", ATTENTION_RUN, before=NEW),
    BlockedRow(STANDARD_ATTENTION, CPU, "-inf", "zero", ATTENTION_RUN, NEW),
    BlockedRow(STANDARD_ATTENTION, CPU, "lowest", "mean", ATTENTION_RUN, before=NEW),
    BlockedRow(STANDARD_ATTENTION, CPU, "lowest", "zero", ATTENTION_RUN, NEW),
    BlockedRow(STANDARD_ATTENTION, CUDA, "bool", "zero", ZEROED, NEW),
    BlockedRow(STANDARD_ATTENTION, CUDA, "-inf", "zero", ZEROED, NEW),
    BlockedRow(STANDARD_ATTENTION, CUDA, "lowest", "mean", ZEROED, NEW),
    BlockedRow(STANDARD_ATTENTION, OPENVINO, "bool", "zero", OPENVINO_RUN),
    BlockedRow(STANDARD_ATTENTION, OPENVINO, "-inf", "zero", OPENVINO_RUN),
    BlockedRow(STANDARD_ATTENTION, OPENVINO, "lowest", "mean", OPENVINO_RUN),
    BlockedRow(MULTI_HEAD_ATTENTION, CPU, "-inf", "nan", RAN),
    BlockedRow(MULTI_HEAD_ATTENTION, CPU, "lowest", "mean", RAN),
    BlockedRow(MULTI_HEAD_ATTENTION, CPU, "lengths", "plain", RAN),
    BlockedRow(CONTRIB_ATTENTION, CPU, "lengths", "plain", RAN),
    BlockedRow(STANDARD_ATTENTION, WEB, "bool", "zero", WEB_RAN),
    BlockedRow(STANDARD_ATTENTION, WEB, "-inf", "zero", WEB_RAN),
    BlockedRow(STANDARD_ATTENTION, WEB, "lowest", "zero", WEB_RAN),
    BlockedRow(MULTI_HEAD_ATTENTION, WEB, "-inf", "nan", WEB_RAN),
    BlockedRow(MULTI_HEAD_ATTENTION, WEB, "lowest", "mean", WEB_RAN),
    BlockedRow(MULTI_HEAD_ATTENTION, WEB, "lengths", "plain", WEB_RAN),
    BlockedRow(CONTRIB_ATTENTION, WEB, "lengths", "plain", WEB_RAN),
)  # fmt: skip


def blocked_row(op: str, runtime: str, version: str, blocked: Blocked) -> Answer:
    """What `op` answers there; "unknown" where nobody has looked."""
    number = parse_version(version)
    for row in BLOCKED_ROWS:
        if (row.op, row.runtime, row.blocked) != (op, runtime, blocked):
            continue
        if row.since <= number and (row.before is None or number < row.before):
            return row.answer
    return "unknown"
