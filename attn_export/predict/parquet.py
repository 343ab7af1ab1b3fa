"""Samples in the rows of a Parquet file: a column for each input, or `image`, `text`, `pair`, `id`.

An image is bytes, or a struct with `bytes` as data sets of images have it.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from attn_export.errors import FileError, one_line
from attn_export.extras import require


def count(path: Path) -> int:
    """Rows of a file.

    Raises:
        FileError: it does not parse, or holds none.
        RuntimeUnavailable: pyarrow is not installed.
    """
    rows = sum(_groups(path))
    if not rows:
        raise FileError(f"{path} holds no row", "leave it out")
    return rows


def sample(path: Path, row: int) -> dict[str, Any]:
    """One row by column."""
    ends = list(accumulate(_groups(path)))
    group = bisect_right(ends, row)
    table = _group(path, group, path.stat().st_mtime_ns)
    first = ends[group - 1] if group else 0
    (found,) = table.slice(row - first, 1).to_pylist()
    values: dict[str, Any] = {key: value for key, value in found.items() if value is not None}
    return values


def _groups(path: Path) -> list[int]:
    file = _file(path)
    return [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]


@lru_cache(maxsize=2)
def _group(path: Path, group: int, _changed: int) -> Any:
    try:
        return _file(path).read_row_group(group)
    except (OSError, ValueError) as error:
        raise FileError(f"{path} does not read ({one_line(error)})", "write it again") from error


def _file(path: Path) -> Any:
    require("ray")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except (OSError, ArrowException) as error:
        raise FileError(f"{path} does not parse ({one_line(error)})", "write it again") from error
