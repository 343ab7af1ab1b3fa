"""What some tests need: skipped where it is missing, unless it is said to be here."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from attn_export.runtimes import table
from tests.web.chromium import PROGRAM

REQUIRED = os.environ.get("ATTN_EXPORT_TESTS_REQUIRE", "").split(",")
"""What continuous integration has, so that its tests fail there rather than vanish."""


def needs(what: str) -> pytest.MarkDecorator:
    """Skip without "chromium" or a runtime such as "ort-web" or "ort-cuda", with the reason."""
    if what == "chromium":
        missing = "" if PROGRAM else "chromium is not on PATH"
    else:
        seen = table.availability(what)
        missing = "" if seen.ok else f"{seen.observed}; {seen.fix}"
    return pytest.mark.skipif(bool(missing) and what not in REQUIRED, reason=missing or "here")


def passed_over(what: str, why: str) -> NoReturn:
    """Skip for want of what only a try shows: "docker", "mount" or "exchange"; fail where it is
    said to be here."""
    if what in REQUIRED:
        pytest.fail(f"{what} is said to be here: {why}")
    pytest.skip(why)
