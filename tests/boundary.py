"""What tests of the boundary need besides fixtures: commands, environments, edited bundles."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.storage import sha256

ROOT = Path(__file__).parent.parent
SCRIPT = Path(sys.executable).with_name("attn-export")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What stdout holds, which must be one JSON document and nothing else."""
        return json.loads(self.stdout)

    @property
    def sentence(self) -> str:
        """The one error sentence; fails where stderr holds anything else."""
        assert "Traceback" not in self.stderr
        (line,) = self.stderr.splitlines()
        assert line.startswith("Error: ")
        assert line.endswith((".", "`"))
        return line.removeprefix("Error: ")


Cli = Callable[..., Ended]


def run(command: list[str | Path], **options: Any) -> Ended:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, **options
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and nothing else."""
    path = folder / bundles.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def reseal(folder: Path) -> None:
    """Give the manifest the hashes of the files as they are now, as a forger would."""

    def update(manifest: dict[str, Any]) -> None:
        for name in manifest["files"]:
            path = folder / name
            manifest["files"][name] = {"sha256": sha256(path), "size": path.stat().st_size}

    edit_manifest(folder, update)


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the built wheel in it, as a production machine has it."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def script(self) -> Path:
        return self.path / "bin" / "attn-export"


def build_environment(extra: str, wheel: Path) -> Environment:
    """`attn-export[extra]` below .envs; what it depends on is kept until a pin changes."""
    pins = [(ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml")]
    key = hashlib.sha256(b"".join([*pins, sys.version.encode()])).hexdigest()[:12]
    made = Environment(ROOT / ".envs" / f"{extra or 'base'}-{key}")
    stamp = made.path / ".installed"
    installing: list[str | Path] = [made.python, "-m", "pip", "install", "-q"]
    if not stamp.is_file():
        for older in made.path.parent.glob(f"{extra or 'base'}-*"):
            shutil.rmtree(older)
        assert run([sys.executable, "-m", "venv", made.path]).code == 0
        wanted = f"{wheel}[{extra}]" if extra else wheel
        done = run([*installing, "--constraint", ROOT / "constraints.txt", wanted])
        assert done.code == 0, done.stderr
    elif stamp.read_text() != sha256(wheel):
        done = run([*installing, "--no-deps", "--force-reinstall", wheel])
        assert done.code == 0, done.stderr
    stamp.write_text(sha256(wheel))
    return made
