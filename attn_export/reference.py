"""`reference.safetensors`: the inputs, PyTorch's outputs, the float64 truth and what is allowed.

Tensors are named CASE/inputs/NAME, CASE/outputs/NAME, CASE/truth/NAME and CASE/allowed/NAME (one
float64 for each group of that output); the header lists the cases. What another precision may err
lies in CASE/allowed.fp16/NAME, PyTorch's own error in that precision in CASE/own.fp16/NAME. Needs
numpy and safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from attn_export.errors import FileError, one_line
from attn_export.parity.tolerance import Array, Group, split
from attn_export.storage import write_file

Budget = dict[str, dict[str, float]]  # output -> group -> absolute error


@dataclass(frozen=True)
class Case:
    """One run that a runtime must reproduce.

    Attributes:
        truth: float64 outputs; empty where PyTorch could not compute them in double.
        allowed: output -> group -> largest absolute error.
        halves: precision -> the same, for graphs of that precision.
        own: precision -> PyTorch's own error in that precision, by output and group.
    """

    name: str
    component: str
    inputs: dict[str, Array]
    outputs: dict[str, Array]
    truth: dict[str, Array] = field(default_factory=dict)
    allowed: dict[str, dict[str, float]] = field(default_factory=dict)
    halves: dict[str, Budget] = field(default_factory=dict)
    own: dict[str, Budget] = field(default_factory=dict)


def group_names(groups: Sequence[Group]) -> list[str]:
    return [group.name for group in groups] or ["all"]


def write_cases(
    path: Path, cases: Sequence[Case], groups: Mapping[str, Mapping[str, Sequence[Group]]]
) -> None:
    """Write the cases; `groups` is component -> output -> groups.

    Raises:
        FileError: the file could not be written.
    """
    tensors: dict[str, Array] = {}
    listing = []
    for case in cases:
        for part in ("inputs", "outputs", "truth"):
            for name, array in getattr(case, part).items():
                tensors[f"{case.name}/{part}/{name}"] = np.asarray(array, order="C")
        for part, budgets in _budgets(case):
            for name, budget in budgets.items():
                order = group_names(groups[case.component].get(name, ()))
                tensors[f"{case.name}/{part}/{name}"] = np.array([budget[g] for g in order])
        listing.append({"name": case.name, "component": case.component})
    write_file(path, save(tensors, metadata={"cases": json.dumps(listing)}))


def _budgets(case: Case) -> Iterator[tuple[str, Budget]]:
    yield "allowed", case.allowed
    for precision, budget in case.halves.items():
        yield f"allowed.{precision}", budget
    for precision, budget in case.own.items():
        yield f"own.{precision}", budget


def read_cases(path: Path, groups: Mapping[str, Mapping[str, Sequence[Group]]]) -> list[Case]:
    """Read the cases back.

    Raises:
        FileError: not a safetensors file, or not one of ours.
    """
    parts: dict[str, dict[str, dict[str, Array]]] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            listing: list[dict[str, Any]] = json.loads((file.metadata() or {})["cases"])
            for key in file.keys():  # noqa: SIM118 - not a mapping
                case, part, name = key.split("/", 2)
                parts.setdefault(case, {}).setdefault(part, {})[name] = file.get_tensor(key)
        return [_case(entry, parts[entry["name"]], groups) for entry in listing]
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise FileError(
            f"{path} is not a readable reference ({one_line(error)})", "export the bundle again"
        ) from error


def _case(
    entry: Mapping[str, Any],
    parts: Mapping[str, Mapping[str, Array]],
    groups: Mapping[str, Mapping[str, Sequence[Group]]],
) -> Case:
    of_output = groups[entry["component"]]

    def budget(part: str) -> Budget:
        return {
            name: dict(zip(group_names(of_output.get(name, ())), map(float, values), strict=True))
            for name, values in parts.get(part, {}).items()
        }

    def of_precisions(kind: str) -> dict[str, Budget]:
        found = [part.partition(".") for part in parts if part.startswith(f"{kind}.")]
        return {precision: budget(f"{kind}.{precision}") for _, _, precision in found}

    allowed = budget("allowed")
    for name, output in parts["outputs"].items():
        split(output, of_output.get(name, ()))
        if name not in allowed:
            raise ValueError(f"case {entry['name']} does not say what is allowed for '{name}'")
    return Case(
        name=entry["name"],
        component=entry["component"],
        inputs=dict(parts.get("inputs", {})),
        outputs=dict(parts["outputs"]),
        truth=dict(parts.get("truth", {})),
        allowed=allowed,
        halves=of_precisions("allowed"),
        own=of_precisions("own"),
    )
