"""What is verified: a bundle, or an .onnx file seen as a bundle of one graph without cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from attn_export import bundle as bundles
from attn_export.capability import TARGET_RUNTIMES
from attn_export.errors import FileError, UsageError
from attn_export.onnx_files import checks as onnx_checks
from attn_export.parity.rules import Rule, check_rules, from_manifest
from attn_export.parity.tolerance import FACTOR, FLOOR

COMPONENT = "model"


def open_subject(path: Path) -> bundles.Bundle:
    """Read a bundle's folder, or an .onnx file.

    Raises:
        FileError: neither, or a bad one.
    """
    return of_file(path) if path.suffix == ".onnx" and not path.is_dir() else bundles.read(path)


def is_file(bundle: bundles.Bundle) -> bool:
    """Whether it is a file seen as a bundle."""
    return "files" not in bundle.manifest


def of_file(path: Path) -> bundles.Bundle:
    """A file as a bundle that only exists in memory: every runtime serves the same graph.

    Raises:
        FileError: the file is bad, or an input is no tensor that numpy has.
    """
    model = onnx_checks.load(path)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    manifest = {
        "name": path.stem,
        "source": str(path),
        "components": [COMPONENT],
        "inputs": [_entry(path, value) for value in inputs],
        "outputs": [_entry(path, value) for value in model.graph.output],
        "targets": [
            {
                "name": name, "runtime": runtime, "component": COMPONENT, "file": path.name,
                "precision": "fp32", "sites": [], "total": 0, "recognised": 0, "lowered": 0,
                "refused": 0, "tolerance": {"factor": FACTOR, "floor": FLOOR},
            }
            for name, runtime in TARGET_RUNTIMES.items()
        ],
    }  # fmt: skip
    return bundles.Bundle(path.parent, manifest)


def _entry(path: Path, value: onnx.ValueInfoProto) -> dict[str, Any]:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.elem_type:
        raise FileError(f"'{value.name}' of {path} is no tensor", "give a file of tensors")
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    except KeyError as error:
        raise FileError(f"'{value.name}' of {path} has no numpy dtype", "change it") from error
    shape: list[int | str] = [
        int(size.dim_value)
        if size.HasField("dim_value")
        else size.dim_param or f"?{value.name}.{axis}"
        for axis, size in enumerate(tensor.shape.dim)
    ]
    return {"name": value.name, "component": COMPONENT, "dtype": dtype, "shape": shape}


def entries(bundle: bundles.Bundle, key: str, component: str) -> list[dict[str, Any]]:
    """The manifest's `inputs` or `outputs` of one component."""
    return [entry for entry in bundle.manifest[key] if entry["component"] == component]


def with_rules(bundle: bundles.Bundle, rules: Mapping[str, Rule], component: str) -> bundles.Bundle:
    """The bundle with these rules of a component's outputs in place of its own."""
    outputs = []
    for entry in bundle.manifest["outputs"]:
        if entry["component"] == component and entry["name"] in rules:
            plain = {key: entry[key] for key in ("name", "component", "dtype", "shape")}
            entry = {**plain, **rules[entry["name"]].to_manifest()}
        outputs.append(entry)
    return replace(bundle, manifest={**bundle.manifest, "outputs": outputs})


def declared(
    bundle: bundles.Bundle, compare: Mapping[str, Rule], masked: Mapping[str, str]
) -> bundles.Bundle:
    """The bundle with the user's rules and masks on top of its own.

    Raises:
        UsageError: no component has such an output, or a rule names what there is not.
    """
    named = {entry["name"] for entry in bundle.manifest["outputs"]}
    for name in [*compare, *masked]:
        if name not in named:
            raise UsageError(
                f"there is no output '{name}'", f"the outputs are {', '.join(sorted(named))}"
            )
    for component in bundle.components:
        rules = {}
        for entry in entries(bundle, "outputs", component):
            rule = own = from_manifest(entry)
            if entry["name"] in compare:
                rule = replace(compare[entry["name"]], mask=own.mask, groups=own.groups)
            rules[entry["name"]] = replace(rule, mask=masked.get(entry["name"], rule.mask))
        check_rules(
            rules, *(_axes(entries(bundle, key, component)) for key in ("outputs", "inputs"))
        )
        bundle = with_rules(bundle, rules, component)
    return bundle


def _axes(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {row["name"]: len(row["shape"]) for row in rows}
