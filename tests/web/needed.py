"""What tests of the browser need: skipped where it is missing, unless it is said to be here."""

from __future__ import annotations

import os

import pytest

from attn_export.runtimes import ort_web
from tests.web.chromium import PROGRAM

REQUIRED = os.environ.get("ATTN_EXPORT_TESTS_REQUIRE", "").split(",")
"""What continuous integration has, so that its tests fail there rather than vanish."""


def needs(what: str) -> pytest.MarkDecorator:
    """Skip without "ort-web" (Node.js and onnxruntime-web) or "chromium", with the reason."""
    if what == "chromium":
        missing = "" if PROGRAM else "chromium is not on PATH"
    else:
        seen = ort_web.availability()
        missing = "" if seen.ok else f"{seen.observed}; {seen.fix}"
    return pytest.mark.skipif(bool(missing) and what not in REQUIRED, reason=missing or "here")
