"""`timm:NAME` and the like, where the package is not installed, or the name says nothing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from attn_export.errors import RuntimeUnavailable, UsageError
from attn_export.packages.built import needs
from attn_export.source import PACKAGES, resolve
from tests.boundary import Cli

ABSENT = [name for name in ("timm", "torchvision", "ultralytics") if find_spec(name) is None]


@pytest.mark.parametrize("package", ABSENT)
def test_without_the_package_one_sentence_says_how_to_get_it(cli: Cli, package: str) -> None:
    ended = cli("inspect", f"{package}:anything")
    assert ended.code == 3
    assert ended.sentence == (
        f"this needs {package}, which is not installed; run `pip install {package}`."
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_source_without_a_name_is_refused(package: str) -> None:
    with pytest.raises(UsageError, match=f"{package}: names no model"):
        resolve(f"{package}:")


def test_a_weight_file_that_is_not_there_is_not_downloaded() -> None:
    with pytest.raises(UsageError, match=r"there is no file yolo11n\.pt"):
        resolve("ultralytics:yolo11n.pt")


def test_a_package_that_raises_when_imported_is_named(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken_package.py").write_text("raise OSError('libfoo.so.1 is missing')")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(RuntimeUnavailable, match=r"importing broken_package .*libfoo"):
        needs("broken_package")
