"""The bundle: the folder that is deployed. Write it, read it, check it; no torch needed.

`manifest.json` lists every other file with its hash. Reading trusts nothing: hashes and sizes are
checked, names must be plain relative ones, links are refused, and nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from attn_export.errors import FileError, UsageError, one_line
from attn_export.parity.tolerance import Group
from attn_export.reference import Case, read_cases
from attn_export.storage import sha256, staged, write_errors, write_file

FORMAT = "attn-export-bundle/1"
MANIFEST = "manifest.json"
REFERENCE = "reference.safetensors"
METRIC = "metric.safetensors"
WEIGHTS = "weights.data"
REPORT = "report.html"


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

    def target_for(self, runtime: str, component: str) -> dict[str, Any]:
        """The target that a runtime serves.

        Raises:
            UsageError: the bundle was not exported for that runtime.
        """
        for target in self.targets(component):
            if target["runtime"] == runtime:
                return target
        have = ", ".join(sorted({target["name"] for target in self.targets()}))
        raise UsageError(
            f"the bundle has no graph for {runtime}, it has targets {have}",
            "export it again with --target for that runtime",
        )

    def model_path(self, target: Mapping[str, Any]) -> Path:
        return self.path / str(target["file"])

    def groups(self) -> dict[str, dict[str, list[Group]]]:
        """component -> output -> its groups."""
        found: dict[str, dict[str, list[Group]]] = {name: {} for name in self.components}
        for output in self.manifest["outputs"]:
            found[output["component"]][output["name"]] = [
                Group(**group) for group in output.get("groups", ())
            ]
        return found

    def compare_modes(self) -> dict[str, dict[str, str]]:
        """component -> output -> how it is compared: elementwise, index or detections."""
        found: dict[str, dict[str, str]] = {name: {} for name in self.components}
        for output in self.manifest["outputs"]:
            found[output["component"]][output["name"]] = output.get("compare", "elementwise")
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
        raise _link(manifest_path)
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
    _check_shape(manifest_path, manifest)
    for name, entry in manifest["files"].items():
        _check_file(path, name, entry)
    for target in manifest["targets"]:
        _check_graph(path, target["file"], manifest["files"])
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


_VALUE = {"name": str, "component": str, "dtype": str, "shape": list}
_TARGET = {
    "name": str, "component": str, "runtime": str, "file": str, "precision": str, "sites": list,
    "total": int, "recognised": int, "lowered": int, "refused": int, "tolerance": dict,
}  # fmt: skip


def _check_shape(path: Path, manifest: Mapping[str, Any]) -> None:
    found = {key: manifest.get(key) for key in ("components", "files")}
    components = found["components"] if isinstance(found["components"], list) else []
    sound = {
        "name": isinstance(manifest.get("name"), str),
        "source": isinstance(manifest.get("source"), str),
        "created": isinstance(manifest.get("created"), str),
        "versions": isinstance(manifest.get("versions"), dict),
        "components": bool(components) and all(isinstance(name, str) for name in components),
        "inputs": _are_rows(manifest.get("inputs"), _VALUE, components),
        "outputs": _are_rows(manifest.get("outputs"), _VALUE, components, at_least=1)
        and {output["component"] for output in manifest["outputs"]} == {*components}
        and all(_are_groups(output.get("groups", [])) for output in manifest["outputs"]),
        "targets": _are_rows(manifest.get("targets"), _TARGET, components, at_least=1),
        "files": isinstance(found["files"], dict)
        and all(isinstance(entry, dict) for entry in found["files"].values()),
    }
    for key, good in sound.items():
        if not good:
            raise FileError(f"{path} has no valid '{key}'", "export the bundle again")
    for target in manifest["targets"]:
        if target.get("file") not in manifest["files"]:
            raise FileError(
                f"{path} lists target '{target.get('name')}' without its file",
                "export the bundle again",
            )
    if REFERENCE not in manifest["files"]:
        raise FileError(f"{path} lists no {REFERENCE}", "export the bundle again")


def _are_rows(
    rows: Any, fields: Mapping[str, type], components: list[Any], at_least: int = 0
) -> bool:
    """Whether these are objects with the given fields, each of a component that there is."""
    return (
        isinstance(rows, list)
        and len(rows) >= at_least
        and all(
            isinstance(row, dict)
            and all(isinstance(row.get(key), kind) for key, kind in fields.items())
            and row["component"] in components
            for row in rows
        )
    )


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict) and group.keys() == Group.__dataclass_fields__.keys()
        for group in groups
    )


def _link(path: Path) -> FileError:
    return FileError(f"{path} is a link", "copy the bundle with its files instead of links")


def _check_file(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or name in ("", ".", MANIFEST):
        raise FileError(f"{folder} lists the unsafe file name '{name}'", "do not use this bundle")
    path = folder / name
    inside = [folder.joinpath(*pure.parts[: depth + 1]) for depth in range(len(pure.parts))]
    if any(part.is_symlink() for part in inside):
        raise _link(path)
    if not path.is_file():
        raise FileError(f"{path} is missing", "copy the whole bundle again")
    if path.stat().st_size != entry.get("size") or sha256(path) != entry.get("sha256"):
        raise FileError(f"{path} is not the file that was exported", "copy the whole bundle again")


def _check_graph(folder: Path, name: str, files: Mapping[str, Any]) -> None:
    """External data must be files of this bundle, or a graph could read any file of the host."""
    try:
        model = onnx.load(folder / name, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError is not part of its public interface
        raise FileError(
            f"{folder / name} is not an ONNX model ({one_line(error)})", "export the bundle again"
        ) from error
    nodes = [*model.graph.node, *(node for f in model.functions for node in f.node)]
    for tensor in [*_constants(model.graph), *_node_tensors(nodes)]:
        if uses_external_data(tensor):
            location = ExternalDataInfo(tensor).location
            if location not in files:
                raise FileError(
                    f"{name} keeps its weights in '{location}', which is not a file of the bundle",
                    "do not use this bundle",
                )


def _constants(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _sparse(graph.sparse_initializer)


def _sparse(tensors: Iterable[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for tensor in tensors:
        yield from (tensor.values, tensor.indices)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """The tensors in attributes, and all of those in subgraphs (If, Loop and Scan bodies)."""
    for node in nodes:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            yield from _sparse((attribute.sparse_tensor, *attribute.sparse_tensors))
            for graph in (attribute.g, *attribute.graphs):
                yield from _constants(graph)
                yield from _node_tensors(graph.node)
