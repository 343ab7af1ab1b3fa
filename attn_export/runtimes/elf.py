"""Which shared libraries a shared library needs, read from its ELF header (System V gABI 4.1)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

SECTIONS = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
DYNAMIC = struct.Struct("<qQ")  # Elf64_Dyn
SHT_DYNAMIC = 6
DT_NULL, DT_NEEDED = 0, 1


def needed(path: Path) -> list[str]:
    """The names in DT_NEEDED, e.g. `libcublas.so.13`; none for what is no 64-bit little-endian ELF.

    Raises:
        OSError: the file does not read.
    """
    with path.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            return []
        (table,) = struct.unpack_from("<Q", header, 0x28)
        size, count = struct.unpack_from("<HH", header, 0x3A)

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        sections = [SECTIONS.unpack(read(table + size * i, SECTIONS.size)) for i in range(count)]
        for _, kind, _, _, offset, length, link, *_ in sections:
            if kind == SHT_DYNAMIC:
                strings = read(sections[link][4], sections[link][5])
                return list(_names(read(offset, length), strings))
    return []


def _names(dynamic: bytes, strings: bytes) -> Iterator[str]:
    for tag, value in DYNAMIC.iter_unpack(dynamic):
        if tag == DT_NULL:
            return
        if tag == DT_NEEDED:
            yield strings[value : strings.index(b"\0", value)].decode()
