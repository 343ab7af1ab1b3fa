"""The question that is put to the table: what one attention computes, without its graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Size = int | str
Mask = Literal["none", "bool", "additive", "lengths"]
Causal = Literal["none", "upper-left", "lower-right", "unknown"]
Version = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """Q (B, N, S, H), K (B, K, T, H), V (B, K, T, Hv); symbolic sizes are strings.

    Attributes:
        dtype: of query, key and value, as numpy names it.
        query_tokens, key_tokens: S and T; two symbols differ unless they are equal. With a cache T
            counts the new keys alone.
        cross: keys are projected from another value than queries.
        causal: what the op itself must do, beside a mask.
        causal_mask: the mask is known to hide all that comes later.
        blocked_rows: a mask may leave a query without any key, and the op itself must then answer
            as PyTorch does. False where the lowering repairs such rows.
        cache: past keys and values go in, present ones come out.
        fixed_past: the number of past tokens is the same in each call.
        window: what the op itself must do, beside a mask.
        weights: softmax(...) is read by something else than this attention.
        opset: of ai.onnx in the graph.
    """

    dtype: str = "float32"
    heads: int = 8
    kv_heads: int = 8
    head_size: int = 64
    v_head_size: int = 64
    batch: Size = "batch"
    query_tokens: Size = "tokens"
    key_tokens: Size = "tokens"
    cross: bool = False
    mask: Mask = "none"
    causal: Causal = "none"
    causal_mask: bool = False
    blocked_rows: bool = False
    cache: bool = False
    fixed_past: bool = False
    weights: bool = False
    softcap: bool = False
    window: bool = False
    opset: int = 23

    def has(self, feature: str) -> bool:
        """Whether a feature of FEATURES holds; "not X" asks for its opposite."""
        wanted = not feature.startswith("not ")
        return FEATURES[feature.removeprefix("not ")](self) is wanted


def _fewer_queries(form: Form) -> bool:
    S, T = form.query_tokens, form.key_tokens
    return S < T if isinstance(S, int) and isinstance(T, int) else S != T


def _many_keys(form: Form) -> bool:
    return isinstance(form.key_tokens, int) and form.key_tokens >= 2048


FEATURES: dict[str, Callable[[Form], bool]] = {
    "grouped heads": lambda form: form.heads != form.kv_heads,
    "heads that do not divide": lambda form: form.heads % form.kv_heads != 0,
    "values of another head size": lambda form: form.head_size != form.v_head_size,
    "head size no multiple of 8": lambda form: form.head_size % 8 != 0,
    "head size above 256": lambda form: form.head_size > 256,
    "several rows": lambda form: form.batch != 1,
    "several queries": lambda form: form.query_tokens != 1,
    "2,048 keys or more": _many_keys,
    "S and T may differ": lambda form: form.query_tokens != form.key_tokens,
    "S may be below T": _fewer_queries,
    "cross-attention": lambda form: form.cross,
    "mask": lambda form: form.mask != "none",
    "dense mask": lambda form: form.mask in ("bool", "additive"),
    "bool mask": lambda form: form.mask == "bool",
    "lengths": lambda form: form.mask == "lengths",
    "causal": lambda form: form.causal != "none",
    "later keys seen": lambda form: form.causal == "none" and not form.causal_mask,
    "causal, aligned lower-right": lambda form: form.causal == "lower-right",
    "causal, alignment unknown": lambda form: form.causal == "unknown",
    "blocked rows": lambda form: form.blocked_rows,
    "cache": lambda form: form.cache,
    "past of a fixed size": lambda form: form.fixed_past,
    "weights read": lambda form: form.weights,
    "softcap": lambda form: form.softcap,
    "window": lambda form: form.window,
    "float32": lambda form: form.dtype == "float32",
    "opset 23": lambda form: form.opset <= 23,
    "opset 24": lambda form: form.opset == 24,
    "opset 25 or later": lambda form: form.opset >= 25,
}
"""What a condition of the table may ask of a form, by the words in which it is printed."""


@dataclass(frozen=True)
class Refusal:
    """Why an op may not be used.

    Attributes:
        code: one of `attn_export.attention.reasons.Reason`.
        words: a clause about the op on that runtime.
        source: where this is known from.
    """

    code: str
    words: str
    source: str

    def __str__(self) -> str:
        return f"{self.words} ({self.source})"


def parse_version(text: str) -> Version:
    """The leading numbers of a version: "1.32.0.dev3" is (1, 32, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    if found is None:
        raise ValueError(f"'{text}' is no version")
    return tuple(int(part) for part in found[0].split("."))
