"""The promise that a padding mask is right padded, so that each of its rows is a length.

A mask (B, T) of integers or truth values keeps it where each row is one or more of the number that
keeps a key, and then nothing but the other one. A row that keeps no key is none: the ops that take
lengths treat 0 as if nothing were blocked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import InputError, UsageError

REMOVE_PADDING = "--remove-padding"
Promises = Mapping[str, int]
"""Input name -> the number that keeps a key: 1, or 0 as in nn.MultiheadAttention's."""


def parse(options: Sequence[str], option_name: str = "--right-padded") -> dict[str, int]:
    """`NAME`, or `NAME=0` where 0 is what keeps a key.

    Raises:
        UsageError: another number behind the name.
    """
    promises = {}
    for option in options:
        name, equals, keeps = option.partition("=")
        if not name or (equals and keeps not in ("0", "1")):
            raise UsageError(
                f"{option_name} {option} is malformed",
                "write the input's name, and =0 behind it if 0 is what keeps a key",
            )
        promises[name] = int(keeps or 1)
    return promises


def broken(mask: NDArray[np.generic], keeps: int) -> str:
    """How a mask (B, T) breaks the promise, as a clause about it; empty where it keeps it."""
    if mask.ndim != 2 or mask.dtype.kind not in "biu":
        return f"is {mask.dtype} with {mask.ndim} axes, not integers or truth values (B, T)"
    if not np.isin(mask, (0, 1)).all():
        return "holds other numbers than 0 and 1"
    kept = mask == keeps
    for row, begins in enumerate(kept[:, :1].all(axis=1)):
        if not begins:
            return f"has a row, {row}, that does not begin with {keeps}, which keeps a key"
    rises = (~kept[:, :-1] & kept[:, 1:]).any(axis=1)
    if rises.any():
        return f"has a row, {int(rises.argmax())}, that keeps a key behind its padding"
    return ""


def check(promises: Promises, inputs: Mapping[str, NDArray[np.generic]]) -> None:
    """Raise InputError where an input breaks its promise."""
    for name, keeps in promises.items():
        problem = broken(inputs[name], keeps) if name in inputs else ""
        if problem:
            raise InputError(
                f"input '{name}' {problem}, and the model was made for right padding alone",
                "pad at the end of each row, or export it again without declaring that",
            )


def mended(mask: NDArray[np.generic], keeps: int) -> NDArray[np.generic]:
    """As many keys of each row kept as before, one at least, and all of them first."""
    kept = np.maximum((mask == keeps).sum(axis=1, keepdims=True), 1)
    return np.where(np.arange(mask.shape[1]) < kept, keeps, 1 - keeps).astype(mask.dtype)


def drawn(
    rng: np.random.Generator, shape: Sequence[int], keeps: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A mask (B, T), and its lengths (B,): from 1 to T, as many different ones as rows allow."""
    batch, tokens = shape
    lengths = 1 + (rng.integers(tokens) + np.arange(batch)) % tokens
    kept = np.arange(tokens) < lengths[:, None]
    return np.where(kept, keeps, 1 - keeps), lengths
