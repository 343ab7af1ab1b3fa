"""Samples in lines: texts, and JSON lines."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from attn_export.errors import FileError, one_line


def count(path: Path) -> int:
    """Lines of a file that are not blank, at least 1.

    Raises:
        FileError: it holds none, or is no UTF-8.
    """
    found = len(_lines(path, path.stat().st_mtime_ns if path.is_file() else 0))
    if not found:
        raise FileError(f"{path} holds no line", "leave it out")
    return found


def text(path: Path, row: int) -> dict[str, Any]:
    return {"text": _line(path, row)}


def json_sample(path: Path, row: int) -> dict[str, Any]:
    """An object; a string alone is a text.

    Raises:
        FileError: it does not parse, or is something else.
    """
    try:
        value = json.loads(_line(path, row))
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"line {row + 1} of {path} is no JSON ({one_line(error)})", "write an object a line"
        ) from error
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise FileError(
            f"line {row + 1} of {path} is a {type(value).__name__}", "write an object a line"
        )
    return value


def _line(path: Path, row: int) -> str:
    return _lines(path, path.stat().st_mtime_ns)[row]


@lru_cache(maxsize=4)
def _lines(path: Path, _changed: int) -> list[str]:
    try:
        found = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is no UTF-8 ({one_line(error)})", "convert it") from error
    except OSError as error:
        raise FileError(f"{path} does not open ({one_line(error)})", "check its path") from error
    return [line.rstrip("\r") for line in found if line.strip()]
