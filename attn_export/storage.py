"""Write to a temporary place beside the target and rename, so that nothing is ever half-written."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attn_export.errors import FileError, UsageError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@contextmanager
def staged(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A fresh folder that becomes `target` when the block ends well, and vanishes when it does not.

    Args:
        target: where it is a link, what it points to is written, and the link stays.
        replace: an existing target is taken away at the last moment. Whether it may be is the
            caller's to decide.

    Raises:
        UsageError: the target exists and `replace` is off.
        FileError: the disk is full, or the place may not be written to.
    """
    target = target.resolve()
    if target.exists() and not replace:
        raise UsageError(f"{target} exists", "choose another -o, or add --overwrite")
    with scratch(target) as stage:
        yield stage
        stage.chmod(0o755)
        _swap(stage, target)


def _swap(stage: Path, target: Path) -> None:
    if not target.exists():
        stage.rename(target)
        return
    if exchange(stage, target):
        return  # what was there goes with the scratch folder
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    try:
        target.rename(old / "old")
        stage.rename(target)
    finally:  # Ctrl-C may come between the two
        if not target.exists():
            (old / "old").rename(target)
        shutil.rmtree(old, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step, so that neither is ever missing; False where the
    system or the disk cannot (renameat2(2) of Linux)."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    names = (os.fsencode(one), os.fsencode(other))
    return bool(rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0)


@contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """Turn an OSError of writing into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(
            f"{target} could not be written ({reason})", "free some space or choose another -o"
        ) from error


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A fresh folder beside what is about to be written; what is left of it vanishes at the end.

    Raises:
        FileError: the disk is full, or the place may not be written to.
    """
    target = target.absolute()
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(
            tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
        )
    try:
        with write_errors(target):
            yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def publish(stage: Path, folder: Path, names: Sequence[str], stale: Sequence[str] = ()) -> None:
    """Move files from a scratch folder to where they belong, over older ones, all or none.

    Args:
        names: in the order in which they appear, so that what others refer to comes first.
        stale: older files that vanish where no new one has their name.
    """
    old: dict[str, Path] = {}
    placed: list[str] = []
    try:
        for name in dict.fromkeys([*names, *stale]):
            if (folder / name).exists():
                old[name] = stage / f"{name}.old"
                (folder / name).rename(old[name])
        for name in names:
            (stage / name).rename(folder / name)
            placed.append(name)
    except BaseException:  # Ctrl-C may come between two of them
        for name in placed:
            (folder / name).unlink()
        for name, kept in old.items():
            kept.rename(folder / name)
        raise


def write_file(path: Path, data: bytes | str) -> None:
    """Write one file through a temporary neighbour.

    Raises:
        FileError: the disk is full, or the place may not be written to.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    raw = data.encode() if isinstance(data, str) else data
    with write_errors(path):
        try:
            partial.write_bytes(raw)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
