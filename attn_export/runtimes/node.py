"""Node.js and the packages that npm installed for it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

from attn_export.errors import RuntimeUnavailable

FOLDER = Path(__file__).parent / "web"
"""Holds package.json and package-lock.json, which pin what `npm ci` installs."""
VARIABLE = "ATTN_EXPORT_WEB"
OLDEST = 20


def node() -> tuple[str, str]:
    """Path and version of Node.js.

    Raises:
        RuntimeUnavailable: there is none on PATH, it does not start, or it is too old.
    """
    fix = f"install Node.js {OLDEST} or newer, from https://nodejs.org or your system's packages"
    path = shutil.which("node")
    if path is None:
        raise RuntimeUnavailable("there is no Node.js: `node` is not on PATH", fix)
    said = _version(path)
    found = re.fullmatch(r"v(\d+)(\.\d+)*", said)
    if found is None:
        raise RuntimeUnavailable(f"{path} does not say its version ({said})", fix)
    if int(found[1]) < OLDEST:
        raise RuntimeUnavailable(f"Node.js {said[1:]} is too old", fix)
    return path, said[1:]


@cache
def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[0] if lines else f"exit {done.returncode}"


def package(name: str) -> tuple[Path, str] | None:
    """Folder and version of an installed npm package, None where there is none.

    It is looked for in the folder that ATTN_EXPORT_WEB names, or else as Node does it for a script
    of attn-export: in `node_modules` beside it and in each folder above. Never in the current
    folder, so that nothing is run that lies beside a bundle by chance.
    """
    named = os.environ.get(VARIABLE)
    for root in [Path(named)] if named else [FOLDER, *FOLDER.parents]:
        folder = root / "node_modules" / name
        if (folder / "package.json").is_file():
            try:
                return folder, str(json.loads((folder / "package.json").read_text())["version"])
            except (ValueError, KeyError, OSError):
                return None
    return None


def install_command() -> str:
    """The one command that installs the pinned packages where `package` finds them."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return f"npm ci --ignore-scripts --prefix {FOLDER}"
    place, files = shlex.quote(named), f"{FOLDER}/package.json {FOLDER}/package-lock.json"
    copied = f"mkdir -p {place} && cp {files} {place}"
    return f"{copied} && npm ci --ignore-scripts --prefix {place}"
