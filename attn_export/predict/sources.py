"""What the user names (files, folders, globs, texts) -> an ordered list of samples, unread.

A sample is known by its place in that list, so that work can be cut into ranges, done by any
process, repeated, and still come out complete and in order.
"""

from __future__ import annotations

import glob
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from attn_export.errors import AttnExportError, FileError, UsageError
from attn_export.predict import arrays, lines, parquet

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
KINDS = {
    **dict.fromkeys(IMAGES, "image"),
    ".npy": "npy",
    ".npz": "npz",
    ".safetensors": "safetensors",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
}


@dataclass(frozen=True)
class Source:
    """A file, or a text of the command line.

    Attributes:
        name: as results call it.
        kind: "image", "npy", "npz", "safetensors", "jsonl", "text", "parquet", "given" (`value` is
            the sample) or "bad" (`error` says why).
        count: of samples, at least 1.
        single: it is one sample rather than a row of them, so its name needs no number.
    """

    name: str
    kind: str
    path: Path = Path()
    count: int = 1
    single: bool = True
    value: Any = None
    error: AttnExportError | None = None

    def label(self, row: int) -> str:
        """The name of one sample: lines count from 1, rows of arrays from 0."""
        if self.single:
            return self.name
        return f"{self.name}:{row + 1}" if self.kind in ("jsonl", "text") else f"{self.name}[{row}]"


class Samples:
    """Sources one behind another, addressed by the number of a sample."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.sources = tuple(sources)
        self._ends = list(accumulate(source.count for source in self.sources))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[Source, int]:
        """The source of a sample, and its row there."""
        place = bisect_right(self._ends, index)
        return self.sources[place], index - (self._ends[place - 1] if place else 0)

    def between(self, start: int, stop: int) -> Iterator[tuple[Source, int]]:
        return (self[index] for index in range(start, stop))

    @cached_property
    def stems_differ(self) -> bool:
        """Whether each sample has a file of its own, no two of one name."""
        return len({source.path.stem.lower() for source in self.sources}) == len(self)

    def kinds(self) -> set[str]:
        return {source.kind for source in self.sources}

    def identity(self) -> list[list[Any]]:
        """What tells whether a later run means the same samples: names, sizes, times, texts."""
        return [_identity(source) for source in self.sources]


def find(
    given: Sequence[str],
    texts: Sequence[str],
    ranks: Mapping[str, int],
    pixels: frozenset[str] = frozenset(),
) -> Samples:
    """The samples behind the command line's arguments, in their order; a folder's by name.

    A file that cannot be opened is a sample too, whose answer is its error.

    Args:
        given: files, folders (all files of known kinds below them) and glob patterns.
        texts: samples of their own, behind the files.
        ranks: input -> how many axes it has, the batch among them.
        pixels: inputs that an image becomes; uint8 arrays for them hold pixels.

    Raises:
        UsageError: nothing of that name, or nothing of a known kind in it.
    """
    files = [path for name in given for path in _files(name)]
    found = [_open(path, ranks, pixels) for path in files]
    found += [Source(_short(text), "given", value={"text": text}) for text in texts]
    if not found:
        raise UsageError("no input is given", "name files or folders, or give --text")
    return Samples(found)


def _files(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in KINDS and p.is_file())
        if not inside:
            raise UsageError(f"{name} holds no file of a known kind", f"kinds: {', '.join(KINDS)}")
        return inside
    if path.exists():
        return [path]
    matching = sorted(Path(match) for match in glob.glob(name, recursive=True))  # noqa: PTH207
    if not matching:
        raise UsageError(f"there is no file {name}", "check its path; a text goes behind --text")
    return [file for match in matching for file in (_files(str(match)))]


def _open(path: Path, ranks: Mapping[str, int], pixels: frozenset[str]) -> Source:
    kind = KINDS.get(path.suffix.lower(), "")
    try:
        if kind in ("image", ""):
            return _image(path, kind)
        if kind in ("jsonl", "text"):
            return Source(str(path), kind, path, lines.count(path), single=False)
        if kind == "parquet":
            return Source(str(path), kind, path, parquet.count(path), single=False)
        rows = arrays.rows(path, kind, ranks, pixels)
        return Source(str(path), kind, path, rows or 1, single=rows is None)
    except FileError as error:
        return Source(str(path), "bad", path, error=error)


def _image(path: Path, kind: str) -> Source:
    if not kind:
        raise FileError(f"{path} is of no known kind", f"kinds: {', '.join(KINDS)}")
    return Source(str(path), kind, path)


def _short(text: str, limit: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _identity(source: Source) -> list[Any]:
    row: list[Any] = [source.name, source.kind, source.count]
    if source.kind == "given":
        return [*row, source.value["text"]]
    if source.path.is_file():
        stat = source.path.stat()
        row += [stat.st_size, stat.st_mtime_ns]
    return row
