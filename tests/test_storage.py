"""Nothing is ever half-written: not on a full disk, not after Ctrl-C, not over something good."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_export import bundle as bundles
from attn_export.errors import FileError, UsageError
from attn_export.storage import exchange, sha256, staged, write_file
from tests.needed import passed_over


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB, for what only a full disk shows (ENOSPC).

    Mounting it takes root. Without, these tests are passed over, and `small_files` still has every
    write of the same code refused by the kernel.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    # Only a mount makes a small disk; `small_files` has writes refused for any user.
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        passed_over("mount", "only root may mount a file system; small_files tests the same")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 64 KB: the kernel refuses the write (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_appears_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with staged(target) as stage:
        (stage / "a").write_text("1")
        assert not target.exists()
    assert [p.name for p in target.iterdir()] == ["a"]
    assert [p.name for p in target.parent.iterdir()] == ["target"]
    assert target.stat().st_mode & 0o777 == 0o755  # mkdtemp's 700 would lock a server out


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_raises_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted() -> None:
        with staged(tmp_path / "target") as stage:
            (stage / "a").write_text("1")
            raise error

    with pytest.raises(error):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tiny_disk: Path) -> None:
    with (
        pytest.raises(FileError, match=r"could not be written \(No space left on device\); free"),
        staged(tiny_disk / "target") as stage,
    ):
        (stage / "weights").write_bytes(bytes(100_000))
    assert list(tiny_disk.iterdir()) == []


def test_a_full_disk_keeps_the_old_file(tiny_disk: Path) -> None:
    write_file(tiny_disk / "a", "old")
    with pytest.raises(FileError, match="No space left"):
        write_file(tiny_disk / "a", bytes(100_000))
    assert [p.read_text() for p in tiny_disk.iterdir()] == ["old"]


@pytest.mark.usefixtures("small_files")
def test_a_refused_write_keeps_the_old_folder(tmp_path: Path) -> None:
    with staged(tmp_path / "target") as stage:
        (stage / "a").write_text("old")
    with (
        pytest.raises(FileError, match="File too large"),
        staged(tmp_path / "target", replace=True) as stage,
    ):
        (stage / "a").write_bytes(bytes(100_000))
    assert [p.read_text() for p in tmp_path.rglob("a")] == ["old"]


@pytest.mark.usefixtures("small_files")
def test_a_refused_write_keeps_the_old_file(tmp_path: Path) -> None:
    write_file(tmp_path / "a", "old")
    with pytest.raises(FileError, match="File too large"):
        write_file(tmp_path / "a", bytes(100_000))
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_an_existing_target_needs_replace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists; choose another -o, or add --overwrite"):
        staged(tmp_path).__enter__()


def test_replacing_takes_every_old_file_away(tmp_path: Path) -> None:
    for name in ("old", "new"):
        with staged(tmp_path / "target", replace=True) as stage:
            (stage / name).touch()
    assert [p.name for p in (tmp_path / "target").iterdir()] == ["new"]


INTERRUPT_BETWEEN_THE_RENAMES = """
import os, signal, sys
from pathlib import Path
from attn_export import storage
from attn_export.storage import staged

storage.exchange = lambda *_: False  # as on a disk that cannot do it in one step
renames = []
def watch(event, arguments):
    if event == "os.rename":
        renames.append(arguments)
        if len(renames) == 2:  # the old folder is away, the new one not there yet
            os.kill(os.getpid(), signal.SIGINT)

with staged(Path(sys.argv[1]), replace=True) as stage:
    (stage / "a").write_text("new")
    sys.addaudithook(watch)
"""


def test_ctrl_c_between_the_two_renames_leaves_the_old_folder_or_the_new(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").write_text("old")
    command = [sys.executable, "-c", INTERRUPT_BETWEEN_THE_RENAMES, str(target)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["target"]
    assert (target / "a").read_text() in ("old", "new")


def test_where_the_disk_can_two_folders_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "one", tmp_path / "other"):
        # renameat2 is Linux's, and some file systems lack it; the two renames are tested above.
        passed_over("exchange", "this disk cannot exchange two names in one step")
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["other"]
    assert exchange(tmp_path / "one", tmp_path / "missing") is False
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["other"]


def test_a_foreign_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with (
        pytest.raises(UsageError, match="is not a bundle, so it is not overwritten"),
        bundles.write(tmp_path, overwrite=True),
    ):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_a_file_is_not_overwritten_by_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError), bundles.write(tmp_path / "thesis.tex", overwrite=True):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_an_empty_folder_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with bundles.write(tmp_path / "empty", overwrite=True) as stage:
        (stage / "a").touch()
    assert (tmp_path / "empty" / "a").exists()


def test_a_file_that_cannot_be_placed_leaves_no_partial_one(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileError, match="could not be written"):
        write_file(tmp_path / "taken", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_sha256_is_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a").startswith("ba7816bf8f01cfea414140de5dae2223")


def test_a_linked_target_is_written_where_the_link_points(tmp_path: Path) -> None:
    for name in ("v1", "v2"):
        with staged(tmp_path / name) as stage:
            (stage / "file").write_text(name)
    (tmp_path / "current").symlink_to("v2")
    with staged(tmp_path / "current", replace=True) as stage:
        (stage / "file").write_text("new")
    assert (tmp_path / "current").is_symlink()
    assert (tmp_path / "v2" / "file").read_text() == "new"
    assert (tmp_path / "v1" / "file").read_text() == "v1"
