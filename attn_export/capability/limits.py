"""Where a kernel exists and still may not be used, or only in a certain way."""

from __future__ import annotations

from dataclasses import dataclass

from attn_export.capability.form import Version
from attn_export.capability.kernels import (
    BINARY,
    CONTRIB_ATTENTION,
    CPU,
    CUDA,
    GROUP_QUERY_ATTENTION,
    MULTI_HEAD_ATTENTION,
    OPENVINO,
    RAN,
    RUNTIMES,
    SPARSE_ATTENTION,
    STANDARD_ATTENTION,
    TENSORRT,
    WEB,
)

PORTABLE = (CPU, WEB)  # the same kernels, compiled to machine code or to WebAssembly
ORT = (*PORTABLE, CUDA)
ANYWHERE = tuple(RUNTIMES)
CONTRIB_SCHEMA = "ONNX Runtime contrib operators"
STANDARD_SCHEMA = "ONNX operator Attention"
FLASH_ALIGNS = "Flash Attention is aligned lower-right, read in ONNX Runtime's CUDA sources"
PARSER = "read in TensorRT's ONNX parser"
LATEST_RUN = "run on ONNX Runtime 1.31.1"
OPENVINO_RUN = "run on OpenVINO 2026.4.1"


@dataclass(frozen=True)
class Limit:
    """What an op may not do on some runtimes.

    Attributes:
        when: features of `form.FEATURES` that must all hold; "not X" is the opposite of X.
        code: one of `attn_export.attention.reasons.Reason`.
        words: what is wrong then, a clause about the op.
        before: the first version that is right; None where none is known.
        since: the first version that is wrong.
    """

    op: str
    runtimes: tuple[str, ...]
    when: tuple[str, ...]
    code: str
    words: str
    source: str
    before: Version | None = None
    since: Version = (0,)


@dataclass(frozen=True)
class Requirement:
    """How a node must be written so that the op is right."""

    op: str
    runtimes: tuple[str, ...]
    words: str
    source: str


def _of_both(op: str) -> tuple[Limit, ...]:
    """What com.microsoft Attention and MultiHeadAttention lack alike."""
    return (
        Limit(op, ANYWHERE, ("grouped heads",), "heads", "has no grouped heads", CONTRIB_SCHEMA),
        Limit(op, ANYWHERE, ("softcap",), "softcap", "has no softcap", CONTRIB_SCHEMA),
        Limit(op, ANYWHERE, ("window",), "window", "has no window", CONTRIB_SCHEMA),
        Limit(op, (CUDA,), ("causal", "S and T may differ", "not cache"), "causal",
              "may be aligned lower-right", FLASH_ALIGNS),
        Limit(op, ANYWHERE, ("causal, aligned lower-right", "not cache"), "causal",
              "is aligned upper-left", RAN),
        Limit(op, ANYWHERE, ("causal, alignment unknown",), "causal",
              "has a causal mask of one alignment alone", CONTRIB_SCHEMA),
        Limit(op, ORT, ("lengths", "blocked rows"), "blocked-rows",
              "treats a row of length 0 as if nothing were blocked", RAN),
        Limit(op, (OPENVINO,), ("lengths",), "mask", "is not known to take lengths", "not tried"),
    )  # fmt: skip


LIMITS = (
    *_of_both(CONTRIB_ATTENTION),
    *_of_both(MULTI_HEAD_ATTENTION),
    Limit(CONTRIB_ATTENTION, ANYWHERE, ("cross-attention",), "projection",
          "takes query, key and value from one value", CONTRIB_SCHEMA),
    Limit(CONTRIB_ATTENTION, ANYWHERE, ("weights read",), "weights-used",
          "does not return its weights", CONTRIB_SCHEMA),

    Limit(MULTI_HEAD_ATTENTION, ANYWHERE, ("weights read",), "weights-used",
          "returns its scores and not its weights", CONTRIB_SCHEMA),
    Limit(MULTI_HEAD_ATTENTION, PORTABLE, ("causal", "S may be below T", "not cache"), "causal",
          "leaves its last query unmasked where S is below T", RAN),
    Limit(MULTI_HEAD_ATTENTION, ORT, ("dense mask", "blocked rows"), "blocked-rows",
          "gives NaN on a row of -inf", RAN),
    Limit(MULTI_HEAD_ATTENTION, ORT, ("lengths", "cache"), "mask",
          "takes no lengths of the new keys beside a cache", RAN),

    Limit(GROUP_QUERY_ATTENTION, ORT, ("later keys seen",), "causal",
          "is always causal before 1.30", "run on ONNX Runtime 1.22 to 1.32", before=(1, 30)),
    Limit(GROUP_QUERY_ATTENTION, (OPENVINO,), ("later keys seen",), "causal",
          "is always causal", OPENVINO_RUN),
    Limit(GROUP_QUERY_ATTENTION, ANYWHERE, ("later keys seen", "window"), "window",
          "has a window only where it is causal", CONTRIB_SCHEMA),
    Limit(GROUP_QUERY_ATTENTION, ANYWHERE, ("heads that do not divide",), "heads",
          "needs a whole number of query heads for each key head", CONTRIB_SCHEMA),
    Limit(GROUP_QUERY_ATTENTION, ANYWHERE, ("head size no multiple of 8",), "heads",
          "needs a head size that is a multiple of 8", RAN),
    Limit(GROUP_QUERY_ATTENTION, ANYWHERE, ("values of another head size",), "heads",
          "needs values of the same head size", CONTRIB_SCHEMA),
    Limit(GROUP_QUERY_ATTENTION, ANYWHERE, ("S and T may differ", "not cache"), "causal",
          "needs as many keys as queries where there is no cache", RAN),
    Limit(GROUP_QUERY_ATTENTION, ANYWHERE, ("causal, alignment unknown",), "causal",
          "is aligned lower-right", CONTRIB_SCHEMA),
    Limit(GROUP_QUERY_ATTENTION, ORT, ("cache", "several rows", "several queries"), "cache",
          "takes several new tokens beside a cache only at batch 1", RAN),
    Limit(GROUP_QUERY_ATTENTION, (CUDA,), ("dense mask",), "mask",
          "takes no bias before 1.31", BINARY, before=(1, 31)),
    Limit(GROUP_QUERY_ATTENTION, ANYWHERE, ("dense mask", "blocked rows"), "blocked-rows",
          "is not known to give 0 on a row that is blocked", "not tried"),
    Limit(GROUP_QUERY_ATTENTION, (CUDA,), ("lengths",), "mask",
          "lets queries that are padding see padding, where no past is given",
          "read in ONNX Runtime's CUDA sources"),
    Limit(GROUP_QUERY_ATTENTION, ANYWHERE, ("weights read",), "weights-used",
          "returns its weights in an order of its own", CONTRIB_SCHEMA),
    Limit(GROUP_QUERY_ATTENTION, (OPENVINO,), ("several rows",), "layout",
          "takes batch 1 alone", OPENVINO_RUN),
    Limit(GROUP_QUERY_ATTENTION, (OPENVINO,), ("not cache",), "cache",
          "needs the tensors of a cache", OPENVINO_RUN),
    Limit(GROUP_QUERY_ATTENTION, (OPENVINO,), ("cache", "past of a fixed size"), "cache",
          "reads a past of a fixed size as a buffer with room for the new tokens", OPENVINO_RUN),
    Limit(GROUP_QUERY_ATTENTION, (OPENVINO,), ("softcap",), "softcap",
          "has no softcap", OPENVINO_RUN),

    Limit(SPARSE_ATTENTION, ANYWHERE, ("later keys seen",), "causal",
          "is always causal", CONTRIB_SCHEMA),
    Limit(SPARSE_ATTENTION, ANYWHERE, ("softcap",), "softcap", "has no softcap", CONTRIB_SCHEMA),
    Limit(SPARSE_ATTENTION, ANYWHERE, ("values of another head size",), "heads",
          "needs values of the same head size", CONTRIB_SCHEMA),

    Limit(STANDARD_ATTENTION, ANYWHERE, ("window",), "window", "has no window", STANDARD_SCHEMA),
    Limit(STANDARD_ATTENTION, ANYWHERE, ("heads that do not divide",), "heads",
          "needs a whole number of query heads for each key head", STANDARD_SCHEMA),
    Limit(STANDARD_ATTENTION, ANYWHERE, ("opset 25 or later",), "no-kernel",
          "is taken apart by ONNX Runtime 1.32 and wrong on OpenVINO from opset 25 on",
          "run on ONNX Runtime 1.32 and OpenVINO 2026.4.1"),
    Limit(STANDARD_ATTENTION, PORTABLE, ("opset 24",), "no-kernel",
          "is wrong at opset 24 before 1.25", "run on ONNX Runtime 1.24 and 1.25",
          before=(1, 25)),
    Limit(STANDARD_ATTENTION, ORT, ("softcap", "mask"), "softcap",
          "leaks masked keys through its softcap before 1.27",
          "run on ONNX Runtime 1.26 and 1.27; microsoft/onnxruntime #28379", before=(1, 27)),
    Limit(STANDARD_ATTENTION, ORT, ("causal", "S and T may differ", "not cache"), "causal",
          "may be aligned lower-right before 1.28", "microsoft/onnxruntime #29020",
          before=(1, 28)),
    Limit(STANDARD_ATTENTION, ORT, ("blocked rows",), "blocked-rows",
          "gives NaN or a mean on a row that is blocked before 1.28",
          "run on ONNX Runtime 1.23 to 1.32", before=(1, 28)),
    Limit(STANDARD_ATTENTION, ANYWHERE, ("causal, aligned lower-right", "not cache"), "causal",
          "is aligned upper-left", STANDARD_SCHEMA),
    Limit(STANDARD_ATTENTION, ANYWHERE, ("causal, alignment unknown",), "causal",
          "has a causal mask of one alignment alone", STANDARD_SCHEMA),
    Limit(STANDARD_ATTENTION, ANYWHERE, ("lengths", "opset 23"), "mask",
          "takes lengths from opset 24 on", STANDARD_SCHEMA),
    Limit(STANDARD_ATTENTION, ANYWHERE, ("lengths", "cache"), "mask",
          "takes lengths or a cache, not both", STANDARD_SCHEMA),
    Limit(STANDARD_ATTENTION, ANYWHERE, ("lengths", "causal"), "causal",
          "counts the queries of each row from the end of its keys where it has lengths",
          LATEST_RUN),
    Limit(STANDARD_ATTENTION, (OPENVINO,), ("lengths",), "mask",
          "is not known to take lengths", "not tried"),
    Limit(STANDARD_ATTENTION, (CUDA,), ("weights read",), "weights-used",
          "returns raw scores alone", BINARY),
    Limit(STANDARD_ATTENTION, (TENSORRT,), ("cache",), "cache",
          "has no cache", f"{PARSER}; NVIDIA/TensorRT #4738"),
    Limit(STANDARD_ATTENTION, (OPENVINO,), ("weights read",), "weights-used",
          "is not known to return its weights", "not tried"),
    Limit(STANDARD_ATTENTION, (TENSORRT,), ("weights read",), "weights-used",
          "has one output", PARSER),
    Limit(STANDARD_ATTENTION, (TENSORRT,), ("softcap",), "softcap",
          "ignores its softcap", PARSER),
    Limit(STANDARD_ATTENTION, (TENSORRT,), ("lengths",), "mask", "ignores lengths", PARSER),
    Limit(STANDARD_ATTENTION, (TENSORRT,), ("head size above 256",), "heads",
          "may find no kernel for heads above 256", "NVIDIA/TensorRT #4705"),
    Limit(STANDARD_ATTENTION, (TENSORRT,), ("blocked rows",), "blocked-rows",
          "is not known to give 0 on a row that is blocked", "not tried"),
)  # fmt: skip


REQUIREMENTS = (
    Requirement(CONTRIB_ATTENTION, PORTABLE,
                "give a bias, zeros if there is none: the kernel reads it unchecked", RAN),
    Requirement(CONTRIB_ATTENTION, PORTABLE, "give a mask of at most 3 axes", RAN),
    Requirement(CONTRIB_ATTENTION, ANYWHERE, "give the bias on scores as (1 or B, 1 or N, S, T)",
                CONTRIB_SCHEMA),
    Requirement(CONTRIB_ATTENTION, ANYWHERE, "ask for the present cache where a past one is given",
                CONTRIB_SCHEMA),
    Requirement(MULTI_HEAD_ATTENTION, PORTABLE,
                "ask for the three outputs where a past cache is given: without them the answer is"
                " wrong", RAN),
    Requirement(MULTI_HEAD_ATTENTION, ANYWHERE,
                "give the bias on scores as (1 or B, 1 or N, S, T); S and T are not broadcast",
                RAN),
    Requirement(MULTI_HEAD_ATTENTION, PORTABLE,
                "give query, key and value apart: packed 5-D ones have no kernel", RAN),
    Requirement(MULTI_HEAD_ATTENTION, (CUDA,), "give no past beside packed 5-D inputs", BINARY),
    Requirement(MULTI_HEAD_ATTENTION, ORT, "give key_padding_mask as int32", RAN),
    Requirement(MULTI_HEAD_ATTENTION, ORT,
                "give padding with holes as the bias on scores: a row of key_padding_mask that"
                " keeps no key counts as if nothing were blocked, PyTorch gives 0", LATEST_RUN),
    *(Requirement(op, ORT, "give mask_filter_value beside lengths or a key padding mask: -10,000,"
                  " which is added without, does not block large scores", LATEST_RUN)
      for op in (CONTRIB_ATTENTION, MULTI_HEAD_ATTENTION)),
    Requirement(GROUP_QUERY_ATTENTION, ORT,
                "give seqlens_k, int32 (B), as the number of keys less 1", CONTRIB_SCHEMA),
    Requirement(GROUP_QUERY_ATTENTION, PORTABLE, "give no q_norm or k_norm weights", RAN),
    Requirement(STANDARD_ATTENTION, ORT,
                "give a mask whose last axes are S and T: the kernel does not broadcast them",
                "run on ONNX Runtime 1.23 to 1.32"),
    Requirement(STANDARD_ATTENTION, ORT, "ask for the present cache where a past one is given",
                "run on ONNX Runtime 1.23 to 1.32"),
    Requirement(STANDARD_ATTENTION, ORT,
                "declare opset 23 or 24", "run on ONNX Runtime 1.31 and 1.32"),
    Requirement(STANDARD_ATTENTION, (CPU,),
                "ask for weights with qk_matmul_output_mode 3: 1 and 2 changed places in ONNX 1.23",
                LATEST_RUN),
    Requirement(STANDARD_ATTENTION, (TENSORRT,), "give a mask of 4 axes", PARSER),
)  # fmt: skip
"""What the lowerings must do, beyond choosing the op; tests run what can be run on a CPU."""
