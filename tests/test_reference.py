"""The stored runs: they read back as they were written, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_export import bundle as bundles
from attn_export.errors import FileError
from attn_export.parity.tolerance import Group
from attn_export.reference import Case, read_cases, write_cases
from tests.boundary import reseal


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_reference_that_does_not_parse_is_refused(bundle_copy: Path, content: bytes) -> None:
    (bundle_copy / "reference.safetensors").write_bytes(content)
    reseal(bundle_copy)
    with pytest.raises(FileError, match="is not a readable reference"):
        bundles.read(bundle_copy).cases()


def test_a_reference_that_does_not_say_what_is_allowed_is_refused(tmp_path: Path) -> None:
    case = Case("c", "model", {}, {"y": np.zeros(2)})
    write_cases(tmp_path / "r", [case], {"model": {}})
    with pytest.raises(FileError, match="does not say what is allowed for 'y'"):
        read_cases(tmp_path / "r", {"model": {}})


def test_cases_read_back_as_they_were_written(tmp_path: Path) -> None:
    y = np.arange(6, dtype=np.float32).reshape(1, 6)
    groups = {"enc": {"y": [Group("box", 1, 0, 4), Group("score", 1, 4, 6)]}}
    allowed = {"y": {"box": 0.5, "score": 0.25}}
    case = Case(
        "a b=1", "enc", {"x.y": np.array([True])}, {"y": y}, {"y": y.astype(float)}, allowed
    )
    write_cases(tmp_path / "r", [case], groups)
    (back,) = read_cases(tmp_path / "r", groups)
    assert (back.name, back.component, back.allowed) == ("a b=1", "enc", allowed)
    np.testing.assert_equal(
        (back.inputs, back.outputs, back.truth), (case.inputs, case.outputs, case.truth)
    )
