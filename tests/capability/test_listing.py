"""docs/capability.md says what the table says."""

from __future__ import annotations

from attn_export.capability.kernels import KERNELS
from attn_export.capability.limits import LIMITS, REQUIREMENTS
from attn_export.capability.listing import page
from tests.boundary import ROOT


def test_the_page_is_up_to_date() -> None:
    """Write what `page()` returns into the file to renew it."""
    assert (ROOT / "docs" / "capability.md").read_text(encoding="utf-8") == page()


def test_each_row_is_on_the_page_with_its_source() -> None:
    lines = page().splitlines()
    for kernel in KERNELS:
        assert any({kernel.op, kernel.runtime, kernel.source} <= _cells(line) for line in lines)
    for limit in LIMITS:
        assert any({limit.op, limit.words, limit.code} <= _cells(line) for line in lines)
    for required in REQUIREMENTS:
        assert any({required.op, required.words} <= _cells(line) for line in lines)


def _cells(line: str) -> set[str]:
    return {cell.strip() for cell in line.strip("|").split(" | ")}
