"""Where the shared libraries are that ONNX Runtime's NVIDIA providers need.

Found without loading them, so that a missing one can be named: ONNX Runtime logs it and goes on
with the CPU.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes.elf import needed

SYSTEM = re.compile(r"(ld-linux.*|lib(c|dl|m|rt|pthread|gcc_s|stdc\+\+))\.so(\.\d+)?$")
NAMED = re.compile(r"(?P<stem>lib\w+)\.so\.(?P<major>\d+)")
LOADER = Path("/etc/ld.so.conf")
CONFIGURED = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
WHEELS = ("nvidia/cu13/lib", "nvidia/*/lib", "tensorrt_libs")


def provider_library(provider: str) -> Path | None:
    """`libonnxruntime_providers_cuda.so` and the like, inside of the onnxruntime package."""
    spec = find_spec("onnxruntime")
    folders = [] if spec is None else spec.submodule_search_locations or []
    paths = (Path(folder, "capi", f"libonnxruntime_providers_{provider}.so") for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def why_not_loaded(provider: str) -> str:
    """What the loader says of a provider's library, in brackets; nothing where it has no fault."""
    path = provider_library(provider.removesuffix("ExecutionProvider").lower())
    if path is None:
        return ""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        # Found with all it needs, it still lacks the symbols of ONNX Runtime, its host.
        return "" if "undefined symbol" in str(error) else f" ({error})"
    return ""


def wanted(library: Path) -> list[str]:
    """What it needs beyond the C and C++ runtime."""
    return [name for name in needed(library) if not SYSTEM.match(name)]


def locate(names: Iterable[str]) -> dict[str, str | None]:
    """Where each library is: in a package of pip's, or where the loader looks; None if nowhere."""
    folders = [*wheel_folders(), *_loader_folders()]
    return {name: _first(folders, name) for name in names}


def _first(folders: Iterable[Path], name: str) -> str | None:
    paths = (folder / name for folder in folders)
    return next((str(path) for path in paths if path.is_file()), None)


def wheel_folders() -> list[Path]:
    """Folders of the NVIDIA packages that pip installed."""
    roots = [Path(entry) for entry in sys.path if entry]
    found = (path for root in roots for pattern in WHEELS for path in sorted(root.glob(pattern)))
    return list(dict.fromkeys(path for path in found if path.is_dir()))


def _loader_folders() -> Iterator[Path]:
    """LD_LIBRARY_PATH, /etc/ld.so.conf and the loader's own, in its order (man 8 ld.so)."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder:
            yield Path(folder)
    yield from configured(LOADER)
    yield from map(Path, CONFIGURED)


def configured(path: Path) -> Iterator[Path]:
    """The folders that a configuration of the loader names, in its order (man 8 ldconfig)."""
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        word = line.partition("#")[0].strip()
        if word.startswith("include "):
            for part in sorted(Path("/").glob(word.split()[1].lstrip("/"))):
                yield from configured(part)
        elif word:
            yield Path(word)


def other_major(missing: str) -> tuple[str, str] | None:
    """Another major version of a missing library that is here, and where."""
    match = NAMED.match(missing)
    if match is None:
        return None
    for folder in [*wheel_folders(), *_loader_folders()]:
        for path in sorted(folder.glob(f"{match['stem']}.so.*")):
            found = NAMED.match(path.name)
            if found and found["stem"] == match["stem"] and found["major"] != match["major"]:
                return found["major"], str(path)
    return None


def preload(found: Mapping[str, str | None]) -> None:
    """Load libraries of pip's packages, where the loader would not look for them.

    Each may need another one of them, so those that fail are tried again until none helps.

    Raises:
        RuntimeUnavailable: one that was found does not load.
    """
    folders = wheel_folders()
    left = [path for path in found.values() if path and Path(path).parent in folders]
    while left:
        failed: list[str] = []
        for path in left:
            try:
                loaded(path)
            except RuntimeUnavailable:
                failed.append(path)
        if len(failed) == len(left):
            loaded(failed[0])  # raises
        left = failed


def loaded(path: str) -> ctypes.CDLL:
    """A library, loaded for all that is loaded after it.

    Raises:
        RuntimeUnavailable: it does not load.
    """
    try:
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeUnavailable(
            f"a library does not load ({error})", "reinstall the package that it came with"
        ) from error
