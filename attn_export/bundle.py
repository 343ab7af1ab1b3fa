"""The bundle: the folder that is deployed. Write it, read it, check it; no torch needed.

`manifest.json` lists every other file with its hash. Reading trusts nothing: hashes and sizes are
checked, names must be plain relative ones, links are refused, and nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_export.bundle_checks import (
    FORMAT,
    MANIFEST,
    METRIC,
    REFERENCE,
    REPORT,
    WEIGHTS,
    check_file,
    check_graph,
    check_shape,
    link,
)
from attn_export.errors import FileError, UsageError, one_line
from attn_export.parity.rules import Rule, from_manifest
from attn_export.parity.tolerance import Group
from attn_export.reference import Case, read_cases
from attn_export.storage import sha256, staged, write_errors, write_file

__all__ = [
    "FORMAT", "MANIFEST", "METRIC", "REFERENCE", "REPORT", "WEIGHTS",
    "Bundle", "add_file", "read", "seal", "update", "write",
]  # fmt: skip


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk whose files were found to be those of its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def components(self) -> list[str]:
        return list(self.manifest["components"])

    def targets(self, component: str | None = None) -> list[dict[str, Any]]:
        """The manifest's targets, of one component or of all."""
        return [
            target
            for target in self.manifest["targets"]
            if component is None or target["component"] == component
        ]

    def target_for(self, runtimes: Sequence[str], component: str) -> dict[str, Any]:
        """The target whose graph a runtime runs: that of the first of `runtimes` that has one.

        Raises:
            UsageError: the bundle was exported for none of them.
        """
        targets = self.targets(component)
        for runtime in runtimes:
            for target in targets:
                if target["runtime"] == runtime:
                    return target
        have = ", ".join(sorted({target["name"] for target in self.targets()}))
        raise UsageError(
            f"the bundle has no graph for {runtimes[0]}, it has targets {have}",
            "export it again with --target for that runtime",
        )

    def model_path(self, target: Mapping[str, Any]) -> Path:
        return self.path / str(target["file"])

    def digest(self) -> str:
        """SHA-256 of the manifest as it lies there, which holds the hash of every other file."""
        return sha256(self.path / MANIFEST)

    def groups(self) -> dict[str, dict[str, list[Group]]]:
        """component -> output -> its groups."""
        found: dict[str, dict[str, list[Group]]] = {name: {} for name in self.components}
        for output in self.manifest["outputs"]:
            found[output["component"]][output["name"]] = [
                Group(**group) for group in output.get("groups", ())
            ]
        return found

    def rules(self) -> dict[str, dict[str, Rule]]:
        """component -> output -> how it is compared."""
        found: dict[str, dict[str, Rule]] = {name: {} for name in self.components}
        for output in self.manifest["outputs"]:
            found[output["component"]][output["name"]] = from_manifest(output)
        return found

    def cases(self) -> list[Case]:
        """The stored runs.

        Raises:
            FileError: the reference does not parse.
        """
        return read_cases(self.path / REFERENCE, self.groups())


def read(path: Path) -> Bundle:
    """Open a bundle and check every file of it.

    Raises:
        FileError: no manifest, an unknown format, a missing or changed file, an unsafe name.
    """
    manifest_path = path / MANIFEST
    if not path.is_dir() or not manifest_path.is_file():
        raise FileError(f"{path} is not a bundle: it has no {MANIFEST}", "give a bundle's folder")
    if manifest_path.is_symlink():
        raise link(manifest_path)
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        written = manifest["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(
            f"{manifest_path} does not parse ({one_line(error)})", "export the bundle again"
        ) from error
    if written != FORMAT:
        raise FileError(
            f"{path} has format '{written}', this version reads '{FORMAT}'",
            "export it again with this version",
        )
    check_shape(manifest_path, manifest)
    for name, entry in manifest["files"].items():
        check_file(path, name, entry)
    for target in manifest["targets"]:
        check_graph(path, target["file"], manifest["files"])
    return Bundle(path, manifest)


@contextmanager
def write(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Fill a bundle's folder: it appears at `target` complete, or not at all.

    Raises:
        UsageError: the target exists and `overwrite` is off, or it is something else than a bundle.
        FileError: the disk is full, or the place may not be written to.
    """
    foreign = target.is_file() or (target.is_dir() and any(target.iterdir()))
    if overwrite and foreign and not (target / MANIFEST).is_file():
        raise UsageError(f"{target} is not a bundle, so it is not overwritten", "choose another -o")
    with staged(target, replace=overwrite) as stage:
        yield stage


def seal(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest over the files that lie in `folder`.

    Raises:
        FileError: it could not be written.
    """
    with write_errors(folder):
        names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != MANIFEST)
        files = {name: _entry(folder / name) for name in names}
    _write_manifest(folder, manifest, files)


def _entry(path: Path) -> dict[str, Any]:
    return {"sha256": sha256(path), "size": path.stat().st_size}


def _write_manifest(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    text = json.dumps({**manifest, "format": FORMAT, "files": files}, indent=2, ensure_ascii=False)
    write_file(folder / MANIFEST, text + "\n")


def update(bundle: Bundle, **changes: Any) -> Bundle:
    """Replace entries of a finished bundle's manifest; its files stay as they are.

    Raises:
        FileError: the manifest could not be written.
    """
    manifest = {**bundle.manifest, **changes}
    _write_manifest(bundle.path, manifest, manifest["files"])
    return read(bundle.path)


def add_file(bundle: Bundle, name: str, data: str | bytes) -> Bundle:
    """Put a file into a finished bundle (a report, say) and list it.

    The manifest leaves the file out while it changes, so that the bundle is sound at any moment.
    """
    folder, manifest = bundle.path, bundle.manifest
    files = {key: entry for key, entry in manifest["files"].items() if key != name}
    if name in manifest["files"]:
        _write_manifest(folder, manifest, files)
    write_file(folder / name, data)
    _write_manifest(folder, manifest, {**files, name: _entry(folder / name)})
    return read(folder)
