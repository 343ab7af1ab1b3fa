"""Samples in .npy, .npz and .safetensors files: one each, or one a row."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from attn_export.errors import FileError, one_line
from attn_export.parity.tolerance import Array


def rows(path: Path, kind: str, ranks: Mapping[str, int], pixels: frozenset[str]) -> int | None:
    """How many samples a file holds; None where it is one, without the axis of the batch.

    A .npy file is for the only input (of those that no tokenizer fills).

    Raises:
        FileError: it does not parse, or its arrays have other ranks or differ in their number.
    """
    counts = {}
    for name, array in named(path, kind, tuple(ranks)).items():
        if name not in ranks:
            raise FileError(
                f"{path} has '{name}', which is no input", f"the inputs are {', '.join(ranks)}"
            )
        counts[name] = _rows(path, name, array, ranks[name], name in pixels)
    if len(set(counts.values())) != 1:
        told = ", ".join(f"{name}: {count or 'one sample'}" for name, count in counts.items())
        raise FileError(f"{path} holds different numbers of samples ({told})", "make them equal")
    (count,) = set(counts.values())
    if count == 0:
        raise FileError(f"{path} holds no sample", "leave it out")
    return count


def _rows(path: Path, name: str, array: Array, rank: int, is_image: bool) -> int | None:
    if is_image and array.dtype == np.uint8:  # (H, W), (H, W, C) or (N, H, W, C)
        return len(array) if array.ndim == 4 else None
    if array.ndim == rank:
        return len(array)
    if array.ndim == rank - 1:
        return None
    raise FileError(
        f"'{name}' in {path} has {array.ndim} axes, the model takes {rank}",
        f"give it {rank}, or {rank - 1} for one sample",
    )


def sample(path: Path, kind: str, names: tuple[str, ...], row: int | None) -> dict[str, Array]:
    """The arrays of one sample, without the axis of the batch."""
    found = named(path, kind, names)
    return {name: array if row is None else array[row] for name, array in found.items()}


def named(path: Path, kind: str, names: tuple[str, ...]) -> dict[str, Array]:
    """A file's arrays by input; those of the last file are kept, for its other rows.

    Raises:
        FileError: it does not parse, or holds Python objects.
    """
    return _named(path, kind, names, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=1)
def _named(path: Path, kind: str, names: tuple[str, ...], _changed: int) -> dict[str, Array]:
    try:
        if kind == "safetensors":
            with safe_open(path, framework="np") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        loaded: Any = np.load(path, mmap_mode="r" if kind == "npy" else None, allow_pickle=False)
        if kind == "npz":
            with loaded:
                return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}", "check its path") from error
    except (
        ValueError, OSError, EOFError, TypeError, SafetensorError, zipfile.BadZipFile
    ) as error:  # fmt: skip
        raise FileError(f"{path} does not parse ({one_line(error)})", "save it again") from error
    if len(names) != 1:
        raise FileError(
            f"{path} is one array, the inputs are {', '.join(names)}", "give .npz or .safetensors"
        )
    return {names[0]: loaded}
