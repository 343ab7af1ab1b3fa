"""What a bundle must be before it is trusted: a sound manifest, its own files, no way out of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from attn_export.errors import FileError, one_line
from attn_export.parity.rules import INVERTED, MODES
from attn_export.parity.tolerance import Group
from attn_export.protos import graph_tensors
from attn_export.storage import sha256

FORMAT = "attn-export-bundle/1"
MANIFEST = "manifest.json"
REFERENCE = "reference.safetensors"
METRIC = "metric.safetensors"
WEIGHTS = "weights.data"
REPORT = "report.html"

_VALUE = {"name": str, "component": str, "dtype": str, "shape": list}
_TARGET = {
    "name": str, "component": str, "runtime": str, "file": str, "precision": str, "sites": list,
    "total": int, "recognised": int, "lowered": int, "refused": int, "tolerance": dict,
}  # fmt: skip


def check_shape(path: Path, manifest: Mapping[str, Any]) -> None:
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
        and all(_are_groups(output.get("groups", [])) for output in manifest["outputs"])
        and _are_rules(manifest),
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


def _are_rules(manifest: Mapping[str, Any]) -> bool:
    """Whether each output is compared in a way that there is, by outputs and inputs there are."""
    outputs, inputs = manifest["outputs"], manifest.get("inputs")
    rows = inputs if isinstance(inputs, list) else []
    given = {(row.get("component"), row.get("name")) for row in rows if isinstance(row, dict)}
    values = {(row["component"], row["name"]) for row in outputs}
    return all(
        row.get("compare", "elementwise") in MODES
        and isinstance(row.get("axis", -1), int)
        and all(
            isinstance(row.get(key, ""), str)
            and (not row.get(key) or (row["component"], row[key]) in values)
            for key in ("of", "sorted_by")
        )
        and isinstance(mask := row.get("mask", ""), str)
        and (not mask or (row["component"], mask.removeprefix(INVERTED)) in given)
        for row in outputs
    )


def link(path: Path) -> FileError:
    return FileError(f"{path} is a link", "copy the bundle with its files instead of links")


def check_file(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or name in ("", ".", MANIFEST):
        raise FileError(f"{folder} lists the unsafe file name '{name}'", "do not use this bundle")
    path = folder / name
    inside = [folder.joinpath(*pure.parts[: depth + 1]) for depth in range(len(pure.parts))]
    if any(part.is_symlink() for part in inside):
        raise link(path)
    if not path.is_file():
        raise FileError(f"{path} is missing", "copy the whole bundle again")
    if path.stat().st_size != entry.get("size") or sha256(path) != entry.get("sha256"):
        raise FileError(f"{path} is not the file that was exported", "copy the whole bundle again")


def check_graph(folder: Path, name: str, files: Mapping[str, Any]) -> None:
    """External data must be files of this bundle, or a graph could read any file of the host."""
    try:
        model = onnx.load(folder / name, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError is not part of its public interface
        raise FileError(
            f"{folder / name} is not an ONNX model ({one_line(error)})", "export the bundle again"
        ) from error
    for tensor in graph_tensors(model):
        if uses_external_data(tensor):
            location = ExternalDataInfo(tensor).location
            if location not in files:
                raise FileError(
                    f"{name} keeps its weights in '{location}', which is not a file of the bundle",
                    "do not use this bundle",
                )
